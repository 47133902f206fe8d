"""What no one can process is set aside with all that is known about it, and comes back mended."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from pipeline.errors import MessageError
from pipeline.keys import Keys, Stream
from pipeline.messages import PromptGroup
from pipeline.queues.leases import lease_of
from pipeline.streams import Entry, Moved, Streams
from pipeline.wire import decode
from tests.streams.conftest import Worker, entries

BROKEN = {
    "truncated": b"\x83\xa6sch",
    "random": bytes(range(200, 256)),
    "empty": b"",
    "of another schema": b"\x83\xa6schema\xcd\x03\xe7\xa4kind\xa6prompt\xa4body\x80",
}


async def bury(streams: Streams, payload: bytes) -> str:
    await streams.feed([Entry(group_id="00000000", weight_version=4, payload=payload)], limit=10)
    (lease,) = await streams.claim(Stream.PROMPTS, 1, block_s=0)
    with pytest.raises(MessageError) as problem:
        decode(lease.payload, PromptGroup)
    assert await streams.dead_letter(lease, str(problem.value))
    return str(problem.value)


@pytest.mark.parametrize("kind", BROKEN)
async def test_a_broken_payload_is_set_aside_with_its_reason_and_comes_back_mended(worker: Worker, kind: str) -> None:
    streams = worker()
    reason = await bury(streams, BROKEN[kind])
    (letter,) = await streams.dead_letters(10)
    assert (letter.reason, letter.stream, letter.attempt) == (reason, Stream.PROMPTS, 1)
    assert (letter.group_id, letter.weight_version, letter.payload) == ("00000000", 4, BROKEN[kind])
    assert letter.dead_at >= letter.created_at > 0
    ledger = await streams.ledger()
    assert (ledger.dead, ledger.live, ledger.balances) == (1, 0, True)

    assert await streams.requeue([letter.letter_id], {letter.letter_id: b"mended"}) == 1
    (lease,) = await streams.claim(Stream.PROMPTS, 1, block_s=0)
    assert (lease.payload, lease.attempt, lease.group_id) == (b"mended", 1, "00000000")
    ledger = await streams.ledger()
    assert (ledger.dead, ledger.live, ledger.balances) == (0, 1, True)
    assert await streams.dead_letters() == []


async def test_an_entry_without_our_fields_comes_out_and_can_be_set_aside(
    worker: Worker, redis: Redis, keys: Keys
) -> None:
    streams = worker()
    await redis.xadd(keys.stream(Stream.ROLLOUTS), {b"\xff": b"\xfe", b"attempt": b"many", b"created_at": b"then"})
    (lease,) = await streams.claim(Stream.ROLLOUTS, 1, block_s=0)
    assert (lease.group_id, lease.payload, lease.attempt, lease.created_at) == ("", b"", 1, 0.0)
    await streams.release([lease])
    (lease,) = await streams.claim(Stream.ROLLOUTS, 1, block_s=0)
    assert await streams.dead_letter(lease, "no payload")
    (letter,) = await streams.dead_letters()
    assert (letter.stream, letter.reason) == (Stream.ROLLOUTS, "no payload")


async def test_all_dead_letters_go_back_to_the_stream_they_died_in(worker: Worker) -> None:
    streams = worker()
    await streams.feed(entries(2), limit=10)
    first, second = await streams.claim(Stream.PROMPTS, 2, block_s=0)
    rollout = Entry(group_id=second.group_id, weight_version=1, payload=b"rollout")
    assert await streams.hand_over(second, rollout, Stream.ROLLOUTS) is Moved.MOVED
    (second,) = await streams.claim(Stream.ROLLOUTS, 1, block_s=0)
    await streams.dead_letter(first, "a")
    await streams.dead_letter(second, "b")
    assert await streams.requeue() == 2
    assert (await streams.claim(Stream.PROMPTS, 1, block_s=0))[0].group_id == first.group_id
    assert (await streams.claim(Stream.ROLLOUTS, 1, block_s=0))[0].payload == b"rollout"


async def test_letters_that_are_gone_or_have_no_room_stay_where_they_are(worker: Worker) -> None:
    streams = worker(max_length=1)
    await bury(streams, b"")
    await streams.feed(entries(1, first=1), limit=10)
    assert await streams.requeue() == 0
    assert await streams.requeue(["1-1", "no id at all"]) == 0
    assert len(await streams.dead_letters()) == 1
    assert (await streams.ledger()).balances


async def test_a_dead_evaluation_group_is_accounted_apart_and_comes_back(worker: Worker) -> None:
    streams = worker()
    await streams.feed(entries(1, is_evaluation=True), limit=0)
    (lease,) = await streams.claim(Stream.PROMPTS, 1, block_s=0)
    await streams.dead_letter(lease, "broken")
    ledger = await streams.ledger()
    assert (ledger.eval_fed, ledger.eval_dead, ledger.eval_live, ledger.dead) == (1, 1, 0, 0)
    assert await streams.requeue() == 1
    (lease,) = await streams.claim(Stream.PROMPTS, 1, block_s=0)
    assert lease.is_evaluation
    ledger = await streams.ledger()
    assert (ledger.eval_dead, ledger.eval_live, ledger.balances) == (0, 1, True)


async def test_a_dead_evaluation_group_that_was_fed_anew_is_not_live_twice(worker: Worker) -> None:
    streams = worker()
    await streams.feed(entries(1, is_evaluation=True), limit=0)
    (lease,) = await streams.claim(Stream.PROMPTS, 1, block_s=0)
    await streams.dead_letter(lease, "broken")
    assert await streams.feed(entries(1, is_evaluation=True), limit=0) == 1
    assert await streams.requeue() == 0
    ledger = await streams.ledger()
    assert (ledger.eval_fed, ledger.eval_dead, ledger.eval_live, ledger.balances) == (2, 1, 1, True)


WRITTEN = [b"group_id", b"attempt", b"weight_version", b"created_at", b"schema", b"payload"]
FIELD_NAMES = st.sampled_from([*WRITTEN, b"evaluation", b"other"])
FIELD_VALUES = st.one_of(
    st.binary(max_size=20), st.sampled_from([b"nan", b"inf", b"-1", b"1e400", b"9" * 5000, b"1", "¹".encode(), b""])
)


@given(fields=st.lists(st.tuples(FIELD_NAMES, FIELD_VALUES), max_size=8))
def test_no_field_of_an_entry_can_stop_a_worker(fields: list[tuple[bytes, bytes]]) -> None:
    in_our_order = [word for name, (_, value) in zip(WRITTEN, fields, strict=False) for word in (name, value)]
    for flat in (in_our_order, [word for field in fields for word in field]):
        lease = lease_of(Stream.PROMPTS, b"1-1", flat)
        assert lease.attempt >= 1
        assert isinstance(lease.payload, bytes)


@pytest.mark.parametrize("attempt", [b"nan", b"inf", b"-1e300", b"9" * 5000, b""])
async def test_an_entry_with_an_absurd_attempt_is_still_taken_over_and_given_back(
    worker: Worker, lapse: Callable[..., Awaitable[None]], redis: Redis, keys: Keys, attempt: bytes
) -> None:
    await redis.xadd(keys.stream(Stream.PROMPTS), {b"group_id": b"a", b"attempt": attempt})
    (lease,) = await worker("first").claim(Stream.PROMPTS, 1, block_s=0)
    await lapse(lease)
    second = worker("second")
    (lease,) = await second.claim(Stream.PROMPTS, 1, block_s=0)
    assert lease.attempt == 2
    assert await second.release_all() == 1
    (lease,) = await worker("third").claim(Stream.PROMPTS, 1, block_s=0)
    assert lease.attempt == 2
