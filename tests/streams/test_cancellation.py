"""A task that is cancelled while it talks to Redis ends, at whatever point that was."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from pipeline.config import QueueSettings
from pipeline.keys import Keys
from pipeline.streams import Streams


@pytest.mark.parametrize("turns", range(16))
async def test_a_cancellation_is_never_swallowed(redis: Redis, keys: Keys, turns: int) -> None:
    streams = Streams(redis, keys, QueueSettings(), consumer="cancelled")
    await streams.open()

    async def look_once_and_go_on() -> str:
        await streams.ledger()
        return "went on"

    task = asyncio.create_task(look_once_and_go_on())
    for _ in range(turns):
        await asyncio.sleep(0)
    was_done = task.done()
    task.cancel()
    (result,) = await asyncio.gather(task, return_exceptions=True)
    assert result == "went on" if was_done else isinstance(result, asyncio.CancelledError)
    assert (await streams.ledger()).fed == 0


@pytest.mark.parametrize("broken_at", range(16))
async def test_nor_is_it_where_the_connection_breaks_at_the_same_moment(
    redis: Redis, keys: Keys, broken_at: int
) -> None:
    """redis-py would try again, and the task go on for ever."""
    streams = Streams(redis, keys, QueueSettings(), consumer="cancelled")
    await streams.open()

    async def look_once_and_go_on() -> str:
        await streams.ledger()
        return "went on"

    for cancelled_at in range(broken_at, 16):
        task = asyncio.create_task(look_once_and_go_on())
        for turn in range(cancelled_at + 1):
            if turn == broken_at:
                for connection in redis.connection_pool._in_use_connections:
                    if connection._writer is not None:
                        connection._writer.transport.abort()
            await asyncio.sleep(0)
        was_done = task.done()
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        assert result == "went on" if was_done else isinstance(result, asyncio.CancelledError)
