"""What was generated of a group stays with it while it waits, and no longer than that."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from redis.asyncio import Redis

from pipeline.keys import Keys, Stream
from pipeline.streams import DropReason, Entry, Lease, Moved, Streams
from tests.streams.conftest import Worker, entries

End = Callable[[Streams, Lease], Awaitable[object]]


async def left_behind(streams: Streams, *, is_evaluation: bool = False) -> Lease:
    """A group whose first generator left something, claimed by another."""
    await streams.feed(entries(1, is_evaluation=is_evaluation), limit=10)
    (lease,) = await streams.claim(Stream.PROMPTS, 1, block_s=0)
    assert not lease.has_partial
    assert await streams.release([lease], partials={lease.group_id: b"begun"}) == 1
    assert await streams.partial(lease.group_id) == b"begun"
    (lease,) = await streams.claim(Stream.PROMPTS, 1, block_s=0)
    assert (lease.attempt, lease.has_partial, lease.is_evaluation) == (1, True, is_evaluation)
    return lease


async def _hand_over(streams: Streams, lease: Lease) -> object:
    entry = Entry(group_id=lease.group_id, weight_version=0, payload=b"whole", is_evaluation=lease.is_evaluation)
    return await streams.hand_over(lease, entry, Stream.ROLLOUTS)


@pytest.mark.parametrize(
    "end",
    [
        _hand_over,
        lambda streams, lease: streams.dead_letter(lease, "broken"),
        lambda streams, lease: streams.drop([lease], DropReason.STALE),
        lambda streams, lease: streams.release([lease], has_failed=True),
        lambda streams, lease: streams.clear(),
    ],
    ids=["handed over", "dead", "dropped", "failed", "cleared"],
)
async def test_it_goes_when_the_group_goes(worker: Worker, redis: Redis, keys: Keys, end: End) -> None:
    streams = worker()
    lease = await left_behind(streams)
    await end(streams, lease)
    assert await streams.partial(lease.group_id) is None
    assert await redis.exists(keys.partials) == 0
    assert (await streams.ledger()).balances


async def test_that_of_an_evaluation_group_goes_with_it(worker: Worker, redis: Redis, keys: Keys) -> None:
    streams = worker()
    lease = await left_behind(streams, is_evaluation=True)
    assert await streams.finish_evaluation([lease]) == []
    assert await redis.exists(keys.partials) == 0


async def test_it_goes_with_a_group_that_was_tried_too_often(
    worker: Worker, redis: Redis, keys: Keys, lapse: Callable[..., Awaitable[None]]
) -> None:
    streams = worker(max_attempts=1)
    lease = await left_behind(streams)
    await lapse(lease)
    assert await worker("other", max_attempts=1).claim(Stream.PROMPTS, 1, block_s=0) == []
    assert (await streams.ledger()).dead == 1
    assert await redis.exists(keys.partials) == 0


async def test_it_stays_while_the_group_is_handed_back_and_is_replaced_by_what_is_newer(worker: Worker) -> None:
    streams = worker()
    lease = await left_behind(streams)
    assert await streams.release([lease]) == 1
    assert await streams.partial(lease.group_id) == b"begun"
    (lease,) = await streams.claim(Stream.PROMPTS, 1, block_s=0)
    assert lease.has_partial
    assert await streams.release([lease], partials={lease.group_id: b"more"}) == 1
    assert await streams.partial(lease.group_id) == b"more"


async def test_who_has_lost_a_group_leaves_nothing_of_it(worker: Worker, lapse: Callable[..., Awaitable[None]]) -> None:
    late, other = worker("late"), worker("other")
    await late.feed(entries(2), limit=10)
    lost, kept = await late.claim(Stream.PROMPTS, 2, block_s=0)
    await lapse(lost)
    (taken,) = await other.claim(Stream.PROMPTS, 1, block_s=0)
    assert taken.group_id == lost.group_id
    assert await late.release([lost, kept], partials={lost.group_id: b"lost", kept.group_id: b"kept"}) == 1
    assert await late.partial(lost.group_id) is None
    assert await late.partial(kept.group_id) == b"kept"
    assert await _hand_over(other, taken) is Moved.MOVED
    assert await other.partial(kept.group_id) == b"kept"


async def test_what_a_killed_worker_saved_is_found_by_whoever_takes_over(
    worker: Worker, lapse: Callable[..., Awaitable[None]]
) -> None:
    killed, other = worker("killed"), worker("other")
    await killed.feed(entries(2), limit=10)
    leases = await killed.claim(Stream.PROMPTS, 2, block_s=0)
    assert await killed.save_partials(leases, {lease.group_id: b"begun" for lease in leases}) == 2
    assert await killed.save_partials(leases[:1], {leases[0].group_id: b"more"}) == 1
    await lapse(*leases)
    taken = await other.claim(Stream.PROMPTS, 2, block_s=0)
    assert [(lease.group_id, lease.attempt, lease.has_partial) for lease in taken] == [
        (lease.group_id, 2, True) for lease in leases
    ]
    assert [await other.partial(lease.group_id) for lease in taken] == [b"more", b"begun"]
    # Who has lost them saves nothing any more, and who has them may hand them back without a word.
    assert await killed.save_partials(leases, {lease.group_id: b"late" for lease in leases}) == 0
    assert await other.release(taken) == 2
    again = await other.claim(Stream.PROMPTS, 2, block_s=0)
    assert [lease.has_partial for lease in again] == [True, True]
    assert await other.partial(again[0].group_id) == b"more"
    assert await other.release_all() == 2
    assert [lease.has_partial for lease in await killed.claim(Stream.PROMPTS, 2, block_s=0)] == [True, True]
