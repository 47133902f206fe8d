"""What the command line shows of a run: tables for people, everything for programs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from redis.asyncio import Redis

from pipeline.config import QueueSettings
from pipeline.fleet import Fleet, WorkerInfo
from pipeline.keys import Keys
from pipeline.messages import Json
from pipeline.queues.leases import Entry
from pipeline.streams import Streams
from tests.conftest import Answer

Ask = Callable[..., Answer]
CHATTY: dict[str, Json] = {"state": "running", "weight_version": 3, "idle_ratio": 0.25, "x" * 40: "y" * 300}


def worker(worker_id: str = "generator-x") -> WorkerInfo:
    return WorkerInfo(
        worker_id=worker_id,
        role=worker_id.partition("-")[0],
        host="here",
        pid=1,
        address="here:1234",
        heartbeat_s=0.5,
        status=CHATTY,
    )


async def test_workers_are_a_table_that_fits_and_json_has_all_they_say(ask: Ask, redis: Redis, keys: Keys) -> None:
    await Fleet(redis, keys).register(worker())
    header, row = (await asyncio.to_thread(ask, "workers")).out.splitlines()
    assert header.split()[:3] == ["worker", "state", "version"]
    assert max(len(header), len(row)) < 120
    assert "yyy" not in row
    assert "here:1234" in row
    (told,) = json.loads((await asyncio.to_thread(ask, "workers", "--json")).out)
    assert told["status"] == CHATTY


async def test_streams_and_status_have_one_vocabulary(ask: Ask, redis: Redis, keys: Keys) -> None:
    streams = Streams(redis, keys, QueueSettings(), consumer="test")
    await streams.open()
    await streams.feed([Entry(group_id="00000000", weight_version=0, payload=b"x", ordinal=0)], limit=1)
    header = "stream    groups  waiting  in work  oldest waiting  oldest in work"
    for command in ("streams", "status"):
        assert header in (await asyncio.to_thread(ask, command)).out.splitlines()


async def test_draining_someone_who_is_lost_says_that_nothing_is_left_to_drain(
    ask: Ask, redis: Redis, keys: Keys
) -> None:
    await Fleet(redis, keys).register(worker())
    _, rest = (await redis.hget(keys.workers, "generator-x")).split(b" ", 1)
    seconds, _ = await redis.time()
    await redis.hset(keys.workers, "generator-x", str((int(seconds) - 60) * 1_000_000).encode() + b" " + rest)
    answer = await asyncio.to_thread(ask, "drain", "generator")
    assert answer.code == 2
    assert "generator-x: lost" in answer.err
