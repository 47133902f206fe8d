"""A server that takes no writes for a while is waited for; nothing is lost or done twice."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from pipeline.config import QueueSettings, RedisSettings
from pipeline.connection import connect
from pipeline.embedded import EmbeddedServer
from pipeline.keys import Keys, Stream
from pipeline.streams import Entry, Streams

BREAK_AND_MEND = {
    "full": (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
    "read-only": (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
}


async def _until_refused(redis: Redis) -> None:
    """Returns when the server refuses a write, so that the call under test will be refused too."""
    while True:
        try:
            await redis.set("probe", "x")
        except ResponseError:
            return


@pytest.mark.parametrize("how", BREAK_AND_MEND)
async def test_calls_wait_until_the_server_takes_writes_again(how: str, keys: Keys) -> None:
    broken, mended = BREAK_AND_MEND[how]
    with EmbeddedServer.start() as server:
        async with connect(RedisSettings(), server.url) as redis, connect(RedisSettings(), server.url) as other:
            streams = Streams(redis, keys, QueueSettings(), consumer="patient")
            await streams.open()
            await other.execute_command(*broken)
            await _until_refused(other)
            entries = [Entry(group_id=f"{i:08d}", weight_version=0, payload=b"x", ordinal=i) for i in range(3)]
            feeding = asyncio.create_task(streams.feed(entries, limit=10))
            done, _ = await asyncio.wait([feeding], timeout=0.3)
            assert not done
            await other.execute_command(*mended)
            async with asyncio.timeout(20):
                assert await feeding == 3
            assert len(await streams.claim(Stream.PROMPTS, 10, block_s=5.0)) == 3
            ledger = await streams.ledger()
            assert ledger.balances
            assert ledger.fed == 3


async def test_what_was_taken_over_is_returned_before_anything_else_is_read(redis: Redis, keys: Keys) -> None:
    # A stalled worker takes over its own groups. Were another read awaited after that, it could finish
    # them meanwhile, and then take them for new ones.
    settings = QueueSettings(lease_s=0.1)
    streams = Streams(redis, keys, settings, consumer="stalled")
    await streams.open()
    entries = [Entry(group_id=f"{i:08d}", weight_version=0, payload=b"x", ordinal=i) for i in range(2)]
    await streams.feed(entries[:1], limit=10)
    (held,) = await streams.claim(Stream.PROMPTS, 1, block_s=1.0)
    await streams.feed(entries[1:], limit=10)
    async with asyncio.timeout(10):
        while True:
            leases = await streams.claim(Stream.PROMPTS, 2, block_s=0.0)
            if any(lease.entry_id == held.entry_id for lease in leases):
                break
            await streams.release(leases)
    assert [lease.entry_id for lease in leases] == [held.entry_id]
