"""Connections come back by themselves, and no secret is in what they say."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from pydantic import SecretStr

from pipeline.config import QueueSettings, RedisSettings
from pipeline.embedded import EmbeddedServer
from pipeline.errors import ConfigError
from pipeline.fleet import Fleet
from pipeline.keys import Keys, Stream
from pipeline.streams import Entry, Moved, Streams, connect
from tests.streams.conftest import entries


def test_a_url_that_cannot_be_one_is_told_without_its_secrets() -> None:
    with pytest.raises(ConfigError) as problem:
        connect(RedisSettings(url=SecretStr("http://me:secret@host:6379")))
    assert "secret" not in str(problem.value)
    assert "'http'" in str(problem.value)
    with pytest.raises(ConfigError) as problem:
        connect(RedisSettings(), "redis://:secret@host:noport")
    assert "secret" not in str(problem.value)


def test_a_lone_worker_is_told_that_it_needs_a_url() -> None:
    with pytest.raises(ConfigError, match="REDIS_URL"):
        connect(RedisSettings())


def test_a_socket_waits_longer_than_any_blocking_read() -> None:
    client = connect(RedisSettings(socket_timeout_s=1.0), "redis://localhost:1")
    assert client.connection_pool.connection_kwargs["socket_timeout"] >= 10


async def test_a_worker_goes_on_after_its_server_was_restarted(tmp_path: Path, keys: Keys) -> None:
    server = EmbeddedServer.start(tmp_path, persist=True)
    client = connect(RedisSettings(), server.url)
    streams = Streams(client, keys, QueueSettings(), consumer="w")
    try:
        await streams.open()
        await streams.feed(entries(2), limit=2)
        (first,) = await streams.claim(Stream.PROMPTS, 1, block_s=0)
        await asyncio.to_thread(server.stop)
        moving = asyncio.create_task(
            streams.hand_over(first, Entry(group_id=first.group_id, weight_version=0, payload=b"x"), Stream.SCORED)
        )
        server = await asyncio.to_thread(EmbeddedServer.start, tmp_path, True)
        assert await moving is Moved.MOVED
        (second,) = await streams.claim(Stream.PROMPTS, 1, block_s=0)
        assert (first.group_id, second.group_id) == ("00000000", "00000001")
        assert (await streams.ledger()).balances
    finally:
        await client.aclose()
        await asyncio.to_thread(server.stop)


async def test_an_outage_longer_than_the_clients_patience_is_waited_for(tmp_path: Path, keys: Keys) -> None:
    server = EmbeddedServer.start(tmp_path, persist=True)
    # One retry: as if the outage had lasted longer than all of them.
    client, other = (connect(RedisSettings(), server.url, retries=1) for _ in range(2))
    streams, claimer = (Streams(redis, keys, QueueSettings(), consumer=str(redis)) for redis in (client, other))
    try:
        await streams.open()
        claiming = asyncio.create_task(claimer.claim(Stream.PROMPTS, 1, block_s=60))
        await asyncio.to_thread(server.stop)
        feeding = asyncio.create_task(streams.feed(entries(1), limit=1))
        committing = asyncio.create_task(streams.commit(["00000007"]))
        asking = asyncio.create_task(Fleet(other, keys).trainer_holder())
        done, _ = await asyncio.wait([claiming, feeding, committing, asking], timeout=1.0)
        assert not done
        server = await asyncio.to_thread(EmbeddedServer.start, tmp_path, True)
        async with asyncio.timeout(180):
            assert await feeding == 1
            assert await committing == 0
            assert await asking is None
            (lease,) = await claiming
        assert lease.group_id == "00000000"
    finally:
        await client.aclose()
        await other.aclose()
        await asyncio.to_thread(server.stop)


async def test_a_blocked_claim_outlives_a_restart_of_its_server(tmp_path: Path, keys: Keys) -> None:
    server = EmbeddedServer.start(tmp_path, persist=True)
    client = connect(RedisSettings(), server.url)
    streams = Streams(client, keys, QueueSettings(), consumer="w")
    feeder = Streams(client, keys, QueueSettings(), consumer="feeder")
    try:
        await streams.open()
        waiting = asyncio.create_task(streams.claim(Stream.PROMPTS, 1, block_s=60))
        await asyncio.to_thread(server.stop)
        server = await asyncio.to_thread(EmbeddedServer.start, tmp_path, True)
        await feeder.feed(entries(1), limit=1)
        (lease,) = await waiting
        assert lease.group_id == "00000000"
    finally:
        await client.aclose()
        await asyncio.to_thread(server.stop)


async def test_a_server_that_stands_still_for_a_while_is_waited_for_and_nothing_is_done_twice(
    short_path: Path, keys: Keys
) -> None:
    with EmbeddedServer.start(short_path) as server:
        async with connect(RedisSettings(), server.url) as redis:
            workers = [Streams(redis, keys, QueueSettings(), consumer=f"w{number}") for number in range(4)]
            await workers[0].open()
            pid = int((await redis.info("server"))["process_id"])
            for pulse in range(3):
                os.kill(pid, signal.SIGSTOP)
                calls = [
                    asyncio.create_task(worker.feed(entries(2, first=8 * pulse + 2 * number), limit=100))
                    for number, worker in enumerate(workers)
                ]
                done, _ = await asyncio.wait(calls, timeout=0.2)
                assert not done
                os.kill(pid, signal.SIGCONT)
                async with asyncio.timeout(180):
                    assert await asyncio.gather(*calls) == [2, 2, 2, 2]
            ledger = await workers[0].ledger()
            assert ledger.balances
            # In any order: what comes behind a higher ordinal counts as fed before.
            assert ledger.fed <= 24
            claimed = await workers[0].claim(Stream.PROMPTS, 100, block_s=0)
            assert len({lease.group_id for lease in claimed}) == len(claimed) == ledger.fed
