"""Work with a publisher ends when it is done, or when the publisher has moved, whatever the look-up does."""

from __future__ import annotations

import asyncio

import pytest

from pipeline.weights import Endpoints
from pipeline.weights.address_watch import MovedError, unless_moved

HERE = Endpoints(announce="tcp://a:1", tiles="tcp://a:2", session="")


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.weights.address_watch.LOOK_EVERY_S", 0.001)


async def test_a_look_up_that_swallows_its_cancellation_holds_nothing_up() -> None:
    """As asyncio.wait_for does before Python 3.12, in whatever a look-up asks."""
    is_looking = asyncio.Event()

    async def swallows() -> Endpoints:
        is_looking.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return HERE
        raise AssertionError

    async def work() -> str:
        await is_looking.wait()
        return "done"

    async with asyncio.timeout(30):
        assert await unless_moved(work(), HERE, swallows) == "done"


async def test_work_with_a_publisher_that_moves_is_given_up() -> None:
    async def nowhere() -> None:
        return None

    with pytest.raises(MovedError):
        await unless_moved(asyncio.Event().wait(), HERE, nowhere)
