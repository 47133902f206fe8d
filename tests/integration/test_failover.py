"""A run whose server is one of two, watched by Sentinels: the primary is killed, and the run goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.exceptions import ConnectionError as Unreachable

from pipeline.checks.findings import Level
from pipeline.checks.server import examine_server
from pipeline.config import RedisSettings
from pipeline.embedded import find_server
from pipeline.streams import connect
from tests.integration.harness import SCRIPTED, running
from tests.sentinels import SERVICE, Watched, watched


@pytest.fixture
def servers(short_path: Path) -> Iterator[Watched]:
    with watched(find_server(), short_path) as started:
        yield started


async def test_a_run_goes_on_when_the_primary_is_killed_and_doctor_says_who_could_take_over(
    tmp_path: Path, servers: Watched, run_name: str
) -> None:
    settings = ("trainer.max_steps=1000000", "trainer.scripted_step_s=0.05", "checkpoint.every_steps=5")
    async with running(tmp_path, servers.url, run_name, *SCRIPTED, *settings) as run:
        found = await asyncio.to_thread(examine_server, run.config)
        assert [(f.subject, f.level) for f in found if f.level is not Level.HINT] == [
            ("redis", Level.OK),
            *[("sentinel", Level.OK)] * 3,
        ]
        async with connect(RedisSettings(), servers.url.replace(f"/{SERVICE}/", "/other/"), retries=0) as redis:
            with pytest.raises(Unreachable, match="knows no service 'other'"):
                await redis.ping()
        run.start_all(generators=2)
        await run.until_steps(5)
        await asyncio.to_thread(servers.hand_over)
        await run.until_steps(run.num_steps + 5)
        await asyncio.to_thread(servers.kill_primary)
        await run.until_steps(run.num_steps + 5)
        await run.fleet.stop("the test is over")
        await run.until_over()
        assert (await run.ledger()).trained > 0, "it balances, whatever the new primary had not heard of"
        found = await asyncio.to_thread(examine_server, run.config)
        assert {f.level for f in found if f.subject == "sentinel"} == {Level.HINT}
