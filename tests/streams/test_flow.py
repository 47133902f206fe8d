"""A group goes from the feeder to the trainer and is in one place at every instant."""

from __future__ import annotations

from pipeline.keys import Stream
from pipeline.streams import DropReason, Entry, Lease, Moved, Streams
from tests.streams.conftest import Worker, entries

LIMIT = 1000


def onward(lease: Lease, payload: bytes = b"rollout") -> Entry:
    return Entry(group_id=lease.group_id, weight_version=3, payload=payload, is_evaluation=lease.is_evaluation)


async def advance(streams: Streams, source: Stream, target: Stream, count: int = 100) -> list[Moved]:
    leases = await streams.claim(source, count, block_s=0)
    return await streams.hand_over_many([(lease, onward(lease)) for lease in leases], target)


async def test_groups_pass_all_stages_in_order_and_the_ledger_balances(worker: Worker) -> None:
    streams = worker()
    assert await streams.feed(entries(5), limit=LIMIT) == 5
    assert await advance(streams, Stream.PROMPTS, Stream.ROLLOUTS) == [Moved.MOVED] * 5
    assert await advance(streams, Stream.ROLLOUTS, Stream.SCORED) == [Moved.MOVED] * 5
    leases = await streams.claim(Stream.SCORED, 3, block_s=0)
    assert [lease.group_id for lease in leases] == ["00000000", "00000001", "00000002"]
    assert leases[0].payload == b"rollout"
    assert leases[0].weight_version == 3
    assert leases[0].attempt == 1
    assert await streams.finish_training(leases, {lease.group_id: b"again" for lease in leases}) == []
    ledger = await streams.ledger()
    assert (ledger.fed, ledger.trained, ledger.uncommitted, ledger.live) == (5, 3, 3, 2)
    assert ledger.balances
    assert await streams.uncommitted() == {lease.group_id: b"again" for lease in leases}
    assert await streams.commit(["00000000", "00000001"]) == 2
    assert (await streams.ledger()).uncommitted == 1


async def test_feeding_stops_at_the_limit_and_goes_on_when_a_place_is_free(worker: Worker) -> None:
    streams = worker()
    groups = entries(6)
    assert await streams.feed(groups, limit=4) == 4
    assert await streams.feed(groups[4:], limit=4) == 0
    lease, *_ = await streams.claim(Stream.PROMPTS, 1, block_s=0)
    assert await streams.drop([lease], DropReason.ZERO_VARIANCE) == 1
    assert await streams.feed(groups[4:], limit=4) == 1
    ledger = await streams.ledger()
    assert ledger.dropped == {"zero_variance": 1}
    assert (ledger.fed, ledger.live, ledger.next_ordinal) == (5, 4, 5)
    assert ledger.balances


async def test_filtering_every_group_never_blocks_feeding(worker: Worker) -> None:
    streams = worker()
    for step in range(20):
        assert await streams.feed(entries(4, first=4 * step), limit=4) == 4
        leases = await streams.claim(Stream.PROMPTS, 4, block_s=0)
        assert await streams.drop(leases, DropReason.UNSCORED) == 4
    ledger = await streams.ledger()
    assert (ledger.fed, ledger.live, ledger.dropped) == (80, 0, {"unscored": 80})
    assert ledger.balances


async def test_an_ordinal_is_fed_once_however_often_it_is_offered(worker: Worker) -> None:
    streams = worker()
    assert await streams.feed(entries(3), limit=LIMIT) == 3
    assert await streams.feed(entries(5), limit=LIMIT) == 5
    assert [lease.group_id for lease in await streams.claim(Stream.PROMPTS, 10, block_s=0)] == [
        f"{ordinal:08d}" for ordinal in range(5)
    ]
    assert (await streams.ledger()).fed == 5


async def test_groups_with_equal_payloads_are_two_groups(worker: Worker) -> None:
    streams = worker()
    assert await streams.feed(entries(2, payload=b"same text"), limit=LIMIT) == 2
    leases = await streams.claim(Stream.PROMPTS, 10, block_s=0)
    assert len({lease.group_id for lease in leases}) == 2


async def test_a_full_stream_takes_no_more_and_the_lease_is_kept(worker: Worker) -> None:
    streams = worker(max_length=2)
    assert await streams.feed(entries(3), limit=LIMIT) == 2
    leases = await streams.claim(Stream.PROMPTS, 2, block_s=0)
    assert await streams.hand_over(leases[0], onward(leases[0]), Stream.ROLLOUTS) is Moved.MOVED
    await streams.feed(entries(1, first=2), limit=LIMIT)
    (third,) = await streams.claim(Stream.PROMPTS, 1, block_s=0)
    pairs = [(lease, onward(lease)) for lease in (leases[1], third)]
    assert await streams.hand_over_many(pairs, Stream.ROLLOUTS) == [Moved.MOVED, Moved.FULL]
    assert await advance(streams, Stream.ROLLOUTS, Stream.SCORED) == [Moved.MOVED] * 2
    assert await streams.hand_over(third, onward(third), Stream.ROLLOUTS) is Moved.MOVED
    assert (await streams.ledger()).balances


async def test_evaluation_groups_share_the_streams_and_are_accounted_apart(worker: Worker) -> None:
    streams = worker()
    assert await streams.feed(entries(3), limit=3) == 3
    assert await streams.feed(entries(2, is_evaluation=True), limit=3) == 2
    assert await streams.feed(entries(2, is_evaluation=True), limit=3) == 2
    ledger = await streams.ledger()
    assert (ledger.fed, ledger.live, ledger.eval_fed, ledger.eval_live) == (3, 3, 2, 2)
    await advance(streams, Stream.PROMPTS, Stream.SCORED)
    leases = await streams.claim(Stream.SCORED, 10, block_s=0)
    evaluation = [lease for lease in leases if lease.is_evaluation]
    assert [lease.group_id for lease in evaluation] == ["eval-00000000", "eval-00000001"]
    assert await streams.finish_evaluation(evaluation) == []
    ledger = await streams.ledger()
    assert (ledger.live, ledger.eval_done, ledger.eval_live, ledger.balances) == (3, 2, 0, True)
    assert await streams.feed(entries(1, is_evaluation=True), limit=0) == 1


async def test_a_dropped_group_can_be_replaced_in_the_same_breath(worker: Worker) -> None:
    streams = worker()
    await streams.feed(entries(2), limit=2)
    leases = await streams.claim(Stream.PROMPTS, 2, block_s=0)
    again = [Entry(group_id=f"{lease.group_id}+", weight_version=5, payload=b"again") for lease in leases]
    assert await streams.drop(leases, DropReason.STALE, refeed=again) == 2
    ledger = await streams.ledger()
    assert (ledger.fed, ledger.dropped, ledger.live, ledger.balances) == (4, {"stale": 2}, 2, True)
    assert [lease.group_id for lease in await streams.claim(Stream.PROMPTS, 5, block_s=0)] == [
        "00000000+",
        "00000001+",
    ]


async def test_groups_trained_into_lost_weights_come_back_before_new_ones(worker: Worker) -> None:
    streams = worker()
    await streams.feed(entries(3), limit=3)
    await advance(streams, Stream.PROMPTS, Stream.SCORED)
    leases = await streams.claim(Stream.SCORED, 3, block_s=0)
    await streams.finish_training(leases, {lease.group_id: b"prompt" for lease in leases})
    await streams.commit(["00000001"])
    lost = [
        Entry(group_id=group_id, weight_version=9, payload=payload)
        for group_id, payload in (await streams.uncommitted()).items()
    ]
    assert [entry.group_id for entry in lost] == ["00000000", "00000002"]
    assert await streams.refeed_uncommitted(lost, limit=1) == 1
    assert await streams.refeed_uncommitted(lost, limit=2) == 2
    assert await streams.feed(entries(1, first=3), limit=3) == 1
    claimed = await streams.claim(Stream.PROMPTS, 5, block_s=0)
    assert [lease.group_id for lease in claimed] == ["00000000", "00000002", "00000003"]
    assert claimed[0].weight_version == 9
    ledger = await streams.ledger()
    assert (ledger.fed, ledger.trained, ledger.uncommitted, ledger.live) == (4, 1, 0, 3)
    assert ledger.balances


async def test_depths_and_peek_tell_what_waits_and_who_works(worker: Worker) -> None:
    streams = worker("reader")
    await streams.feed(entries(3), limit=3)
    (lease,) = await streams.claim(Stream.PROMPTS, 1, block_s=0)
    depths = await streams.depths()
    prompts = depths[Stream.PROMPTS]
    assert (prompts.length, prompts.pending, prompts.backlog) == (3, 1, 2)
    assert prompts.oldest_pending_s >= prompts.oldest_waiting_s >= 0
    assert (depths[Stream.SCORED].length, depths[Stream.SCORED].oldest_waiting_s) == (0, 0.0)
    first, second = await streams.peek(Stream.PROMPTS, 2)
    assert (first.group_id, first.consumer, first.num_payload_bytes) == (lease.group_id, "reader", 6)
    assert second.consumer is None
    assert await streams.peek(Stream.SCORED, 2) == []


async def test_an_empty_batch_is_no_call_at_all(worker: Worker) -> None:
    streams = worker()
    assert await streams.feed([], limit=1) == 0
    assert await streams.hand_over_many([], Stream.ROLLOUTS) == []
    assert await streams.finish_training([], {}) == []
    assert await streams.drop([], DropReason.STALE) == 0
    assert await streams.commit([]) == 0
    assert await streams.requeue() == 0


async def test_batches_larger_than_one_call_keep_their_order(worker: Worker) -> None:
    streams = worker()
    assert await streams.feed(entries(700), limit=LIMIT) == 700
    assert await advance(streams, Stream.PROMPTS, Stream.SCORED, 700) == [Moved.MOVED] * 700
    leases = await streams.claim(Stream.SCORED, 700, block_s=0)
    assert [lease.group_id for lease in leases] == [f"{ordinal:08d}" for ordinal in range(700)]
    assert await streams.finish_training(leases, {lease.group_id: b"" for lease in leases}) == []
    assert (await streams.ledger()).trained == 700
