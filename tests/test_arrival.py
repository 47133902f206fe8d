"""A worker that arrives while the server refuses it: it waits, says for what, and comes in when it may."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from pipeline.config import RedisSettings
from pipeline.errors import ConfigError
from pipeline.fleet import Fleet
from pipeline.keys import Keys
from pipeline.metrics import Metrics
from pipeline.queues.connection import connect
from pipeline.settings.files import load_config
from pipeline.worker.arrival import Arrival
from pipeline.worker.state import WorkerState
from tests.refusing import BREAK_AND_MEND, break_, mend, server_without_a_place_for_snapshots


def arriving(url: str, run_name: str, state: WorkerState) -> Arrival:
    config = load_config([], environ={}, overrides=[f"run.name={run_name}", f"redis.url={json.dumps(url)}"])
    return Arrival(config, state, Metrics(run_name, state.role, state.worker_id), "127.0.0.1:1", joins=True)


@pytest.mark.parametrize("how", BREAK_AND_MEND)
async def test_a_server_that_takes_no_writes_is_waited_for_at_arrival(
    how: str, run_name: str, short_path: Path
) -> None:
    state = WorkerState("scorer", "scorer-a")
    with server_without_a_place_for_snapshots(short_path) as server:
        async with connect(RedisSettings(), server.url) as redis, connect(RedisSettings(), server.url) as other:
            await break_(other, how)
            entering = asyncio.create_task(arriving(server.url, run_name, state).enter(redis))
            async with asyncio.timeout(180):
                # Where the disk is full even a ping is refused; the others hear of it with the first write.
                said = "Redis (MISCONF" if how == "disk full" else "Redis"
                while not (state.waiting_for or "").startswith(said):  # noqa: ASYNC110 - a note sets no event
                    await asyncio.sleep(0.01)
            done, _ = await asyncio.wait([entering], timeout=0.3)
            assert not done
            await mend(other, how)
            async with asyncio.timeout(180):
                context = await entering
            assert context is not None
            assert context.run_id
            assert state.waiting_for is None
            assert [seen.worker_id for seen in await Fleet(other, Keys(run_name)).workers()] == ["scorer-a"]


@pytest.mark.parametrize("how", BREAK_AND_MEND)
async def test_a_worker_that_waits_at_arrival_can_be_told_to_end(how: str, run_name: str, short_path: Path) -> None:
    state = WorkerState("scorer", "scorer-a")
    with server_without_a_place_for_snapshots(short_path) as server:
        async with connect(RedisSettings(), server.url) as redis, connect(RedisSettings(), server.url) as other:
            await break_(other, how)
            entering = asyncio.create_task(arriving(server.url, run_name, state).enter(redis))
            done, _ = await asyncio.wait([entering], timeout=0.3)
            assert not done
            state.drain()
            async with asyncio.timeout(180):
                assert await entering is None
            await mend(other, how)  # without a place for its snapshot it would not end


@pytest.mark.parametrize("database", ["99", "1000000"])
async def test_a_database_that_does_not_exist_is_not_waited_for(database: str, run_name: str, valkey_url: str) -> None:
    url = f"{valkey_url}?db={database}"
    async with connect(RedisSettings(), url) as redis:
        with pytest.raises(ConfigError, match="the server has no such database"):
            await arriving(url, run_name, WorkerState("scorer", "scorer-a")).enter(redis)
