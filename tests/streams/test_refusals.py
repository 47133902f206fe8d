"""A server that takes no writes for a while is waited for; nothing is lost or done twice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from redis.asyncio import Redis

from pipeline.config import QueueSettings, RedisSettings
from pipeline.fleet import Fleet
from pipeline.keys import Keys, Stream
from pipeline.messages import Endpoints
from pipeline.queues.connection import connect
from pipeline.streams import Entry, Streams
from tests.refusing import BREAK_AND_MEND, break_, mend, server_without_a_place_for_snapshots
from tests.streams.conftest import Worker, entries


@pytest.mark.parametrize("how", BREAK_AND_MEND)
async def test_calls_wait_until_the_server_takes_writes_again(how: str, keys: Keys, short_path: Path) -> None:
    with server_without_a_place_for_snapshots(short_path) as server:
        async with connect(RedisSettings(), server.url) as redis, connect(RedisSettings(), server.url) as other:
            streams = Streams(redis, keys, QueueSettings(), consumer="patient")
            await streams.open()
            await break_(other, how)
            feeding = asyncio.create_task(streams.feed(entries(3), limit=10))
            done, _ = await asyncio.wait([feeding], timeout=0.3)
            assert not done
            await mend(other, how)
            async with asyncio.timeout(180):
                assert await feeding == 3
            assert len(await streams.claim(Stream.PROMPTS, 10, block_s=5.0)) == 3
            ledger = await streams.ledger()
            assert ledger.balances
            assert ledger.fed == 3


WHAT_WORKERS_DO: dict[str, Callable[[Fleet, Streams], Awaitable[object]]] = {
    "commit": lambda fleet, streams: streams.commit(["00000000"]),
    "release_all": lambda fleet, streams: streams.release_all(),
    "join": lambda fleet, streams: fleet.join({"lora.rank": "0"}),
    "set_version": lambda fleet, streams: fleet.set_version(3),
    "set_endpoints": lambda fleet, streams: fleet.set_endpoints(Endpoints(announce="a", tiles="b", session="c")),
    "acquire_trainer": lambda fleet, streams: fleet.acquire_trainer("trainer-a", 30.0),
    "stop": lambda fleet, streams: fleet.stop("all steps are done"),
    "deregister": lambda fleet, streams: fleet.deregister("trainer-a"),
}


@pytest.mark.parametrize("how", ["read-only", "disk full"])
async def test_whatever_a_worker_writes_waits_until_the_server_takes_it(how: str, keys: Keys, short_path: Path) -> None:
    with server_without_a_place_for_snapshots(short_path) as server:
        async with connect(RedisSettings(), server.url) as redis, connect(RedisSettings(), server.url) as other:
            workers = [Streams(redis, keys, QueueSettings(), consumer=name) for name in WHAT_WORKERS_DO]
            await workers[0].open()
            await workers[0].feed(entries(1), limit=1)
            (lease,) = await workers[0].claim(Stream.PROMPTS, 1, block_s=1.0)
            await workers[0].hand_over(
                lease, Entry(group_id=lease.group_id, weight_version=0, payload=b"x"), Stream.SCORED
            )
            scored = await workers[0].claim(Stream.SCORED, 1, block_s=1.0)
            await workers[0].finish_training(scored, {lease.group_id: b"p"})
            await break_(other, how)
            fleet = Fleet(redis, keys)
            calls = {
                name: asyncio.ensure_future(do(fleet, streams))
                for (name, do), streams in zip(WHAT_WORKERS_DO.items(), workers, strict=True)
            }
            done, _ = await asyncio.wait(calls.values(), timeout=0.3)
            assert not done
            await mend(other, how)
            async with asyncio.timeout(180):
                await asyncio.gather(*calls.values())
            assert calls["commit"].result() == 1
            assert calls["acquire_trainer"].result() is True
            facts = await fleet.facts()
            assert (facts.weight_version, facts.trainer) == (3, "trainer-a")
            assert (await workers[0].ledger()).uncommitted == 0


async def test_a_server_that_keeps_forgetting_scripts_stops_nobody(redis: Redis, redis_url: str, keys: Keys) -> None:
    streams, fleet = Streams(redis, keys, QueueSettings(), consumer="w"), Fleet(redis, keys)

    async def forget() -> None:
        async with connect(RedisSettings(), redis_url) as other:
            while True:
                await other.script_flush()

    flushing = [asyncio.create_task(forget()) for _ in range(4)]
    try:
        await streams.open()
        for version in range(200):
            assert await fleet.set_version(version) == version
            assert await streams.feed(entries(1, first=version), limit=1000) == 1
    finally:
        for task in flushing:
            task.cancel()
        await asyncio.gather(*flushing, return_exceptions=True)
    assert (await streams.ledger()).fed == 200


async def test_what_was_taken_over_is_returned_before_anything_else_is_read(redis: Redis, keys: Keys) -> None:
    # A stalled worker takes over its own groups. Were another read awaited after that, it could finish
    # them meanwhile, and then take them for new ones.
    settings = QueueSettings(lease_s=0.1)
    streams = Streams(redis, keys, settings, consumer="stalled")
    await streams.open()
    await streams.feed(entries(1), limit=10)
    (held,) = await streams.claim(Stream.PROMPTS, 1, block_s=1.0)
    await streams.feed(entries(1, first=1), limit=10)
    async with asyncio.timeout(180):
        while True:
            leases = await streams.claim(Stream.PROMPTS, 2, block_s=0.0)
            if any(lease.entry_id == held.entry_id for lease in leases):
                break
            await streams.release(leases)
    assert [lease.entry_id for lease in leases] == [held.entry_id]


async def test_a_lapsed_lease_is_found_within_a_third_of_a_lease_though_there_is_always_something_new(
    worker: Worker, lapse: Callable[..., Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that what a killed worker held is taken over well within two leases."""
    now = [1000.0]
    monkeypatch.setattr("pipeline.streams.time", SimpleNamespace(monotonic=lambda: now[0]))
    killed, busy = worker("killed"), worker("busy", lease_s=30.0)
    await killed.feed(entries(6), limit=10)
    (lost,) = await killed.claim(Stream.PROMPTS, 1, block_s=0)
    found = await busy.claim(Stream.PROMPTS, 1, block_s=0)
    await lapse(lost)
    for now[0] in (1005.0, 1009.9, 1010.0, 1011.0):
        found += await busy.claim(Stream.PROMPTS, 1, block_s=0)
    assert [lease.group_id for lease in found] == ["00000001", "00000002", "00000003", lost.group_id, "00000004"]
