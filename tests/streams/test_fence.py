"""A trainer that was replaced is refused by the server, however late it wakes up, before any heartbeat."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from pipeline.errors import TrainerReplacedError
from pipeline.fleet import Fleet
from pipeline.keys import Keys, Stream
from pipeline.messages import Endpoints
from pipeline.streams import DropReason, Entry
from tests.streams.conftest import Worker, entries


def _at(host: str) -> Endpoints:
    return Endpoints(announce=f"tcp://{host}:1", tiles=f"tcp://{host}:2", session="")


async def test_what_a_replaced_trainer_asks_is_refused_and_changes_nothing(
    worker: Worker, redis: Redis, keys: Keys
) -> None:
    fleet, stale, successor = Fleet(redis, keys), worker("stale"), worker("successor")
    assert await fleet.acquire_trainer("stale", 30.0)
    stale.fence = "stale"
    assert await stale.feed(entries(2), limit=10) == 2
    leases = await stale.claim(Stream.PROMPTS, 2, block_s=0)
    for lease in leases:
        await stale.hand_over(lease, Entry(group_id=lease.group_id, weight_version=0, payload=b"x"), Stream.SCORED)
    scored = await stale.claim(Stream.SCORED, 2, block_s=0)
    assert await fleet.set_version(3, trainer="stale") == 3

    await redis.delete(keys.trainer_lock)  # as if it had stood still for long
    assert await fleet.acquire_trainer("successor", 30.0)
    successor.fence = "successor"
    await fleet.set_endpoints(_at("successor"), trainer="successor")
    await redis.hset(keys.uncommitted, "trained", b"p")  # type: ignore[misc]
    before = await successor.ledger()
    for refused in (
        stale.finish_training(scored, {lease.group_id: b"p" for lease in scored}),
        stale.feed(entries(1, first=2), limit=10),
        stale.drop(scored[:1], DropReason.STALE),
        stale.dead_letter(scored[0], "late"),
        stale.commit(["trained"]),
        fleet.set_version(4, trainer="stale"),
        fleet.set_endpoints(_at("stale"), trainer="stale"),
    ):
        with pytest.raises(TrainerReplacedError):
            await refused
    assert await successor.ledger() == before
    assert await fleet.version() == 3
    assert await fleet.endpoints() == _at("successor")
    # What it held is the successor's at once when it leaves.
    assert await stale.release_all() == 2
    taken = await successor.claim(Stream.SCORED, 2, block_s=0)
    assert await successor.finish_training(taken, {lease.group_id: b"p" for lease in taken}) == []


async def test_a_trainer_whose_run_redis_has_lost_is_not_taken_for_a_replaced_one(worker: Worker) -> None:
    streams = worker("trainer")
    streams.fence = "trainer"
    assert await streams.feed(entries(1), limit=10) == 1


async def test_who_left_by_itself_does_not_come_back(worker: Worker, redis: Redis, keys: Keys) -> None:
    fleet, streams = Fleet(redis, keys), worker("trainer")
    await fleet.acquire_trainer("trainer", 30.0)
    streams.fence = "trainer"
    assert await fleet.release_trainer("trainer")
    with pytest.raises(TrainerReplacedError):
        await streams.feed(entries(1), limit=10)
