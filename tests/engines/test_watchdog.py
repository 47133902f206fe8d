"""An engine that stands still is noticed, one that has nothing to do or makes headway is not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from pipeline.engines.scripted import ScriptedEngine
from pipeline.engines.watchdog import Watchdog
from pipeline.errors import EngineLostError
from tests.engines.test_scripted import group, started

STALL_S = 0.2


@contextlib.asynccontextmanager
async def busy(*, tokens_per_s: float) -> AsyncIterator[ScriptedEngine]:
    engine = await started(tokens_per_s=tokens_per_s, length_mean=10_000)
    generating = asyncio.create_task(engine.generate(group()))
    await asyncio.sleep(0)
    try:
        yield engine
    finally:
        generating.cancel()
        await engine.close()


async def stays_quiet(engine: ScriptedEngine, *, may_rest: bool = False) -> bool:
    """Whether nothing is said for several times the limit."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(Watchdog(engine, STALL_S, lambda: may_rest).run(), 3 * STALL_S)
        return False
    return True


async def test_an_engine_whose_tokens_do_not_come_is_lost() -> None:
    async with busy(tokens_per_s=1e-6) as engine:
        with pytest.raises(EngineLostError, match=r"4 sequences.*generation\.stall_s"):
            await Watchdog(engine, STALL_S, lambda: False).run()


async def test_an_engine_that_sleeps_works_or_is_idle_is_left_alone() -> None:
    async with busy(tokens_per_s=1e-6) as engine:
        assert await stays_quiet(engine, may_rest=True)
    async with busy(tokens_per_s=1000) as engine:
        assert await stays_quiet(engine)
    assert await stays_quiet(await started())
