"""Stream tests run on Valkey and on Debian's Redis, with workers that they name themselves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
from redis.asyncio import Redis

from pipeline.config import QueueSettings, RedisSettings
from pipeline.keys import CONSUMER_GROUP, Keys
from pipeline.streams import Entry, Lease, Streams, connect

Worker = Callable[..., Streams]


@pytest.fixture
async def redis(redis_url: str, keys: Keys) -> AsyncIterator[Redis]:
    """A client of a server of each kind; the run's keys are removed afterwards."""
    client = connect(RedisSettings(), redis_url)
    yield client
    async for key in client.scan_iter(match=keys.pattern.encode()):
        await client.delete(key)
    await client.aclose()


@pytest.fixture
async def worker(redis: Redis, keys: Keys) -> Worker:
    """Makes the streams of the test's run as a consumer of that name sees them."""

    def make(name: str = "worker", **settings: float) -> Streams:
        return Streams(redis, keys, QueueSettings.model_validate(settings), consumer=name)

    await make().open()
    return make


@pytest.fixture
def lapse(redis: Redis, keys: Keys) -> Callable[..., object]:
    """Lets leases lapse at once: their holder has shown no sign of life for a day."""

    async def let_lapse(*leases: Lease) -> None:
        for lease in leases:
            key = keys.stream(lease.stream)
            (row,) = await redis.xpending_range(key, CONSUMER_GROUP, lease.entry_id, lease.entry_id, 1)
            day_ms = 24 * 3600 * 1000
            await redis.xclaim(key, CONSUMER_GROUP, row["consumer"], 0, [lease.entry_id], idle=day_ms, justid=True)

    return let_lapse


def entries(num: int, *, first: int = 0, is_evaluation: bool = False, payload: bytes = b"prompt") -> list[Entry]:
    """Groups `first` to `first + num - 1`."""
    prefix = "eval-" if is_evaluation else ""
    return [
        Entry(
            group_id=f"{prefix}{ordinal:08d}",
            weight_version=0,
            payload=payload,
            is_evaluation=is_evaluation,
            ordinal=None if is_evaluation else ordinal,
        )
        for ordinal in range(first, first + num)
    ]
