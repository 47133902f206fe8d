"""A group is held by one worker at a time, and no worker that vanishes or stalls loses or doubles it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from pipeline.keys import CONSUMER_GROUP, Keys, Stream
from pipeline.streams import DropReason, Entry, Lease, LeaseKeeper, Moved, Streams
from tests.streams.conftest import Worker, entries

Lapse = Callable[..., Awaitable[None]]


def result(lease: Lease, payload: bytes = b"rollout") -> Entry:
    return Entry(group_id=lease.group_id, weight_version=1, payload=payload)


async def claim_one(streams: Streams, stream: Stream = Stream.PROMPTS) -> Lease:
    (lease,) = await streams.claim(stream, 1, block_s=0)
    return lease


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 180.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110 - what changes is in Redis and sets no event
            await asyncio.sleep(0.005)


async def test_a_group_of_a_killed_worker_is_taken_over_and_finished_once(worker: Worker, lapse: Lapse) -> None:
    killed, other = worker("killed"), worker("other")
    await killed.feed(entries(1), limit=10)
    first = await claim_one(killed)
    assert await other.claim(Stream.PROMPTS, 1, block_s=0) == []
    await lapse(first)
    second = await claim_one(other)
    assert (second.group_id, second.attempt) == (first.group_id, 2)
    assert await other.hand_over(second, result(second), Stream.ROLLOUTS) is Moved.MOVED
    assert (await other.ledger()).live == 1


async def test_all_groups_of_a_killed_worker_come_before_what_is_new(worker: Worker, lapse: Lapse) -> None:
    killed, other = worker("killed"), worker("other")
    await killed.feed(entries(6), limit=10)
    held = await killed.claim(Stream.PROMPTS, 4, block_s=0)
    await lapse(*held)
    claimed = [await claim_one(other) for _ in range(6)]
    assert [lease.attempt for lease in claimed] == [2, 2, 2, 2, 1, 1]


async def test_the_late_result_of_a_stalled_worker_is_refused_and_counted(
    worker: Worker, lapse: Lapse, redis: Redis, keys: Keys
) -> None:
    stalled, other = worker("stalled"), worker("other")
    await stalled.feed(entries(1), limit=10)
    late = await claim_one(stalled)
    await lapse(late)
    taken = await claim_one(other)
    assert await stalled.hand_over(late, result(late, b"late"), Stream.ROLLOUTS) is Moved.REFUSED
    assert await other.hand_over(taken, result(taken, b"in time"), Stream.ROLLOUTS) is Moved.MOVED
    assert await stalled.hand_over(late, result(late, b"later"), Stream.ROLLOUTS) is Moved.REFUSED
    assert await redis.xlen(keys.stream(Stream.ROLLOUTS)) == 1
    assert (await claim_one(other, Stream.ROLLOUTS)).payload == b"in time"
    ledger = await other.ledger()
    assert ledger.refused == 2
    assert ledger.balances


async def test_whoever_lost_a_lease_can_do_nothing_with_the_group(worker: Worker, lapse: Lapse) -> None:
    stalled, other = worker("stalled"), worker("other")
    await stalled.feed(entries(1), limit=10)
    lease = await claim_one(stalled)
    await stalled.hand_over(lease, result(lease), Stream.SCORED)
    lease = await claim_one(stalled, Stream.SCORED)
    await lapse(lease)
    await claim_one(other, Stream.SCORED)
    assert await stalled.renew([lease]) == [lease]
    assert await stalled.finish_training([lease], {lease.group_id: b""}) == [lease]
    assert await stalled.drop([lease], DropReason.STALE) == 0
    assert not await stalled.dead_letter(lease, "late")
    assert await stalled.release([lease]) == 0
    ledger = await other.ledger()
    assert (ledger.live, ledger.trained, ledger.dead, ledger.num_dropped, ledger.refused) == (1, 0, 0, 0, 3)


async def test_one_lease_named_twice_in_a_batch_moves_one_group(worker: Worker, redis: Redis, keys: Keys) -> None:
    streams = worker()
    await streams.feed(entries(2), limit=10)
    first, second = await streams.claim(Stream.PROMPTS, 2, block_s=0)
    pairs = [(lease, result(lease)) for lease in (second, first, second)]
    assert await streams.hand_over_many(pairs, Stream.ROLLOUTS) == [Moved.MOVED, Moved.MOVED, Moved.REFUSED]
    assert await redis.xlen(keys.stream(Stream.ROLLOUTS)) == 2
    assert (await streams.ledger()).balances


async def test_a_group_that_no_worker_finishes_is_dead_lettered_after_max_attempts(
    worker: Worker, lapse: Lapse
) -> None:
    streams = worker("last", max_attempts=3)
    await streams.feed(entries(2), limit=10)
    for attempt in (1, 2, 3):
        lease = await claim_one(worker(f"victim-{attempt}", max_attempts=3))
        assert (lease.group_id, lease.attempt) == ("00000000", attempt)
        await lapse(lease)
    assert (await claim_one(streams)).group_id == "00000001"
    (letter,) = await streams.dead_letters()
    assert (letter.group_id, letter.attempt, letter.stream) == ("00000000", 3, Stream.PROMPTS)
    assert "3 attempts" in letter.reason
    assert letter.payload == b"prompt"
    ledger = await streams.ledger()
    assert (ledger.dead, ledger.live) == (1, 1)
    assert ledger.balances


async def test_a_released_group_is_free_at_once_and_its_attempt_does_not_count(worker: Worker, lapse: Lapse) -> None:
    draining, other = worker("draining"), worker("other")
    await draining.feed(entries(1), limit=10)
    await lapse(await claim_one(other))
    lease = await claim_one(draining)
    assert lease.attempt == 2
    waiting = asyncio.create_task(other.claim(Stream.PROMPTS, 1, block_s=20))
    await draining.release([lease])
    (taken,) = await waiting
    assert (taken.group_id, taken.attempt, taken.payload) == (lease.group_id, 2, b"prompt")
    assert taken.created_at == lease.created_at
    await other.release([taken], has_failed=True)
    assert (await claim_one(draining)).attempt == 3
    assert (await other.ledger()).balances


async def test_a_worker_that_leaves_gives_back_what_it_holds_and_is_forgotten(
    worker: Worker, redis: Redis, keys: Keys
) -> None:
    leaving, other = worker("leaving"), worker("other")
    await leaving.feed(entries(3), limit=10)
    await leaving.claim(Stream.PROMPTS, 2, block_s=0)
    assert await leaving.release_all() == 2
    consumers = await redis.xinfo_consumers(keys.stream(Stream.PROMPTS), CONSUMER_GROUP)
    assert [consumer["name"] for consumer in consumers if consumer["name"] == b"leaving"] == []
    leases = await other.claim(Stream.PROMPTS, 10, block_s=0)
    assert sorted(lease.group_id for lease in leases) == ["00000000", "00000001", "00000002"]
    assert {lease.attempt for lease in leases} == {1}


async def test_an_entry_that_its_worker_never_saw_comes_back_when_the_lease_lapses(
    worker: Worker, lapse: Lapse, redis: Redis, keys: Keys
) -> None:
    streams = worker("unlucky")
    await streams.feed(entries(1), limit=10)
    # The server delivers, and the reply is lost on the way.
    stream = keys.stream(Stream.PROMPTS)
    await redis.xreadgroup(CONSUMER_GROUP, "unlucky", {stream: ">"}, count=1)
    assert await streams.claim(Stream.PROMPTS, 1, block_s=0) == []
    (row,) = await redis.xpending_range(stream, CONSUMER_GROUP, "-", "+", 1)
    await redis.xclaim(stream, CONSUMER_GROUP, "unlucky", 0, [row["message_id"]], idle=10**8, justid=True)
    assert (await claim_one(streams)).attempt == 1, "no one has tried it"


async def test_a_claim_that_is_cancelled_while_it_waits_loses_nothing(worker: Worker) -> None:
    streams, feeder = worker("cancelled"), worker("feeder")
    waiting = asyncio.create_task(streams.claim(Stream.PROMPTS, 5, block_s=60))
    await asyncio.sleep(0)
    await feeder.feed(entries(2), limit=10)
    waiting.cancel()
    (outcome,) = await asyncio.gather(waiting, return_exceptions=True)
    seen = [] if isinstance(outcome, BaseException) else outcome
    await streams.release_all()
    left = await feeder.claim(Stream.PROMPTS, 5, block_s=0)
    assert sorted(lease.group_id for lease in left) == ["00000000", "00000001"], f"{seen} were released too"


async def test_lapsed_leases_far_behind_many_live_ones_are_found(worker: Worker, lapse: Lapse) -> None:
    busy, other = worker("busy"), worker("other")
    await busy.feed(entries(60), limit=100)
    leases = await busy.claim(Stream.PROMPTS, 60, block_s=0)
    await lapse(leases[-1])
    assert (await claim_one(other)).group_id == leases[-1].group_id


async def test_a_keeper_renews_until_the_lease_is_dropped(worker: Worker, redis: Redis, keys: Keys) -> None:
    streams = worker(lease_s=0.3)
    await streams.feed(entries(1), limit=10)
    lease = await claim_one(streams)

    async def idle_ms() -> int:
        (row,) = await redis.xpending_range(keys.stream(Stream.PROMPTS), CONSUMER_GROUP, "-", "+", 1)
        return int(row["time_since_delivered"])

    async def was_renewed() -> bool:
        nonlocal longest
        now = await idle_ms()
        was_reset, longest = now < longest, max(longest, now)
        return was_reset

    longest = 0
    async with LeaseKeeper(streams) as keeper:
        keeper.hold([lease])
        await until(was_renewed)
        assert not keeper.is_lost(lease)
        keeper.drop([lease])
        assert keeper.held == ()
    assert await streams.hand_over(lease, result(lease), Stream.ROLLOUTS) is Moved.MOVED


async def test_a_keeper_tells_which_lease_was_lost(worker: Worker, lapse: Lapse) -> None:
    stalled, other = worker("stalled", lease_s=0.2), worker("other")
    await stalled.feed(entries(2), limit=10)
    kept, lost = await stalled.claim(Stream.PROMPTS, 2, block_s=0)
    await lapse(lost)
    await claim_one(other)
    async with LeaseKeeper(stalled) as keeper:
        keeper.hold([kept, lost])

        async def is_told() -> bool:
            return keeper.is_lost(lost)

        await until(is_told)
        assert not keeper.is_lost(kept)
        assert keeper.held == (kept,)


async def test_a_worker_that_stood_still_does_not_take_its_own_groups_for_new_ones(
    worker: Worker, lapse: Lapse
) -> None:
    streams, other = worker("stalled"), worker("other")
    await streams.feed(entries(2), limit=10)
    async with LeaseKeeper(streams) as keeper:
        leases = await streams.claim(Stream.PROMPTS, 2, block_s=0)
        assert keeper.hold(leases) == leases
        await lapse(leases[0])
        again = await claim_one(streams)
        assert again.entry_id == leases[0].entry_id
        assert keeper.hold([again]) == []
        await lapse(leases[1])
        await claim_one(other)
        await keeper.renew_now()
        assert keeper.is_lost(leases[1])
        await lapse(leases[1])
        back = await claim_one(streams)
        assert keeper.hold([back]) == [back]
        assert not keeper.is_lost(back)


async def test_what_a_worker_takes_back_from_itself_is_no_further_attempt(
    worker: Worker, lapse: Lapse, redis: Redis, keys: Keys
) -> None:
    stalled, other = worker("stalled", max_attempts=2), worker("other", max_attempts=2)
    await stalled.feed(entries(3), limit=10)
    leases = await stalled.claim(Stream.PROMPTS, 3, block_s=0)
    for _ in range(4):
        await lapse(*leases)
        again = await stalled.claim(Stream.PROMPTS, 3, block_s=0)
        assert [(lease.entry_id, lease.attempt) for lease in again] == [(lease.entry_id, 1) for lease in leases]
        assert [lease.payload for lease in again] == [b"prompt"] * 3
    await lapse(*leases)
    # Whoever takes a group from another counts, and may be asked for fewer than have lapsed.
    (taken,) = await other.claim(Stream.PROMPTS, 1, block_s=0)
    assert (taken.entry_id, taken.attempt) == (leases[0].entry_id, 2)
    (own,) = await stalled.claim(Stream.PROMPTS, 1, block_s=0)
    assert (own.entry_id, own.attempt) == (leases[1].entry_id, 1)
    await redis.xdel(keys.stream(Stream.PROMPTS), leases[2].entry_id)
    assert await stalled.claim(Stream.PROMPTS, 3, block_s=0) == [], "one that somebody deleted is gone"
    assert (await other.ledger()).dead == 0


async def test_a_keeper_outlives_failing_calls() -> None:
    class Failing:
        lease_s = 0.01
        calls = 0

        async def renew(self, leases: object) -> list[Lease]:
            self.calls += 1
            raise RedisError("away")

    streams = Failing()
    async with LeaseKeeper(streams) as keeper:

        async def failed_twice() -> bool:
            return keeper.num_failures > 1

        await until(failed_twice)


async def test_what_a_keeper_cannot_explain_is_raised_at_its_end() -> None:
    class Broken:
        lease_s = 0.01
        was_called = asyncio.Event()

        async def renew(self, leases: object) -> list[Lease]:
            self.was_called.set()
            raise KeyError("a mistake of ours")

    streams = Broken()
    with pytest.raises(KeyError):
        async with LeaseKeeper(streams):
            await streams.was_called.wait()
