"""The reply to a call is lost, redis-py sends the call again: nothing is done twice."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from pipeline.config import QueueSettings, RedisSettings
from pipeline.keys import Keys, Stream
from pipeline.streams import DropReason, Entry, Lease, Ledger, Moved, Streams, connect
from tests.streams.conftest import Worker, entries
from tests.streams.lossy import LossyWay

NUM = 3


@pytest.fixture
async def way(redis_url: str, tmp_path: Path) -> AsyncIterator[LossyWay]:
    async with LossyWay.open(tmp_path / "s", redis_url) as way:
        yield way


@pytest.fixture
async def far(way: LossyWay, keys: Keys, worker: Worker) -> AsyncIterator[Streams]:
    """A worker whose replies can get lost. (`worker` opens the streams.)"""
    client = connect(RedisSettings(), way.url)
    streams = Streams(client, keys, QueueSettings(), consumer="far")
    await streams.ledger()
    yield streams
    await client.aclose()


async def scored(streams: Streams) -> list[Lease]:
    """Leases on NUM groups that are ready to be trained."""
    await streams.feed(entries(NUM), limit=NUM)
    leases = await streams.claim(Stream.PROMPTS, NUM, block_s=0)
    await streams.hand_over_many([(lease, as_entry(lease)) for lease in leases], Stream.SCORED)
    return await streams.claim(Stream.SCORED, NUM, block_s=0)


def as_entry(lease: Lease) -> Entry:
    return Entry(group_id=lease.group_id, weight_version=0, payload=b"x")


async def test_feeding_counts_once(far: Streams, way: LossyWay) -> None:
    groups = [Entry(group_id=str(i), weight_version=0, payload=b"x") for i in range(NUM)]
    way.loses = True
    assert await far.feed(groups, limit=NUM + 1) == NUM
    assert way.num_lost == 1
    ledger = await far.ledger()
    assert (ledger.fed, ledger.live, ledger.balances) == (NUM, NUM, True)


async def _hand_over(streams: Streams, leases: list[Lease]) -> None:
    pairs = [(lease, as_entry(lease)) for lease in leases]
    assert await streams.hand_over_many(pairs, Stream.ROLLOUTS) == [Moved.MOVED] * NUM


async def _finish(streams: Streams, leases: list[Lease]) -> None:
    assert await streams.finish_training(leases, {lease.group_id: b"p" for lease in leases}) == []


async def _drop(streams: Streams, leases: list[Lease]) -> None:
    again = [Entry(group_id=f"{lease.group_id}+", weight_version=0, payload=b"x") for lease in leases]
    assert await streams.drop(leases, DropReason.STALE, refeed=again) == NUM


async def _dead_letter(streams: Streams, leases: list[Lease]) -> None:
    assert await streams.dead_letter(leases[0], "broken")


async def _release(streams: Streams, leases: list[Lease]) -> None:
    assert await streams.release(leases) == NUM


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (_hand_over, Ledger(fed=3, live=3)),
        (_finish, Ledger(fed=3, trained=3, uncommitted=3)),
        (_drop, Ledger(fed=6, dropped={"stale": 3}, live=3)),
        (_dead_letter, Ledger(fed=3, dead=1, live=2)),
        (_release, Ledger(fed=3, live=3)),
    ],
)
async def test_a_movement_is_made_once_and_answered_as_made(
    far: Streams, way: LossyWay, act: Callable[[Streams, list[Lease]], Awaitable[None]], expected: Ledger
) -> None:
    leases = await scored(far)
    way.loses = True
    await act(far, leases)
    assert way.num_lost == 1
    ledger = await far.ledger()
    assert ledger == Ledger(
        fed=expected.fed,
        trained=expected.trained,
        uncommitted=expected.uncommitted,
        dropped=expected.dropped,
        dead=expected.dead,
        live=expected.live,
        next_ordinal=NUM,
    )
    assert ledger.balances


async def test_dead_letters_are_requeued_once(far: Streams, way: LossyWay) -> None:
    for lease in await scored(far):
        await far.dead_letter(lease, "broken")
    letters = [letter.letter_id for letter in await far.dead_letters()]
    way.loses = True
    assert await far.requeue(letters) == NUM
    ledger = await far.ledger()
    assert (ledger.dead, ledger.live, way.num_lost) == (0, NUM, 1)


async def test_groups_that_were_claimed_without_the_worker_knowing_are_not_lost(far: Streams, way: LossyWay) -> None:
    assert await far.claim(Stream.PROMPTS, NUM, block_s=0) == []
    await far.feed(entries(NUM), limit=NUM)
    way.loses = True
    assert await far.claim(Stream.PROMPTS, NUM, block_s=0) == []
    assert (await far.depths())[Stream.PROMPTS].pending == NUM
    await far.release_all()
    assert len(await far.claim(Stream.PROMPTS, NUM, block_s=0)) == NUM
