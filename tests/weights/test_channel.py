"""From publisher to subscriber when nothing breaks: late, lossy, slow and overtaken."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zmq
from structlog.testing import capture_logs

from pipeline.config import WeightSettings
from pipeline.errors import WeightError
from pipeline.weights import Endpoints, WeightKind, WeightPublisher, WeightState, WeightSubscriber
from pipeline.weights.codec import WeightObject
from pipeline.weights.protocol import Header, Kind
from pipeline.weights.subscriber_stats import Phase
from tests.weights.states import FAST, at, channel, make_state, next_within, same, tensor, until

ROOT = Path(__file__).parent.parent.parent


async def test_tensors_arrive_bit_for_bit_under_their_version() -> None:
    odd = np.array([np.nan, -0.0, np.inf, -np.inf, 1e-40], dtype=np.float32)
    state = WeightState(
        weight_version=7,
        kind=WeightKind.ADAPTER,
        tensors={
            "scalar": tensor(np.float32(3.5), "float32", ()),
            "empty": tensor(np.empty((3, 0, 2), np.float32), "float32"),
            "odd": tensor(odd, "float32"),
            "brain": tensor(odd.view(np.uint16), "bfloat16"),
            "large": tensor(np.arange(100_000, dtype=np.int64), "int64"),
            "truth": tensor([True, False], "bool"),
        },
    )
    async with channel() as (publisher, subscriber):
        publisher.publish(state)
        assert same(await next_within(subscriber, None), state)


async def test_whoever_asks_for_the_same_version_again_has_skipped_none() -> None:
    async with channel() as (publisher, subscriber):
        publisher.publish(make_state(3))
        for _ in range(2):
            assert same(await next_within(subscriber, None), make_state(3))
            assert subscriber.stats.num_skipped == 0


async def test_a_state_of_nothing_but_empty_tensors_arrives() -> None:
    state = WeightState(weight_version=0, kind=WeightKind.SNAPSHOT, tensors={"a": tensor(np.empty(0), "float64")})
    async with channel() as (publisher, subscriber):
        publisher.publish(state)
        assert same(await next_within(subscriber, None), state)


async def test_a_joiner_gets_the_newest_version_and_then_waits_for_a_newer_one() -> None:
    async with channel() as (publisher, subscriber):
        for version in range(3):
            publisher.publish(make_state(version))
        assert same(await next_within(subscriber, None), make_state(2))
        waiting = asyncio.create_task(next_within(subscriber, 2))
        publisher.publish(make_state(3))
        assert same(await waiting, make_state(3))


async def test_versions_published_before_the_start_are_served() -> None:
    with WeightPublisher(FAST) as publisher:
        publisher.publish(make_state(5))
        async with WeightSubscriber(FAST, resolve=at(publisher.start())) as subscriber:
            assert same(await next_within(subscriber, 4), make_state(5))


async def test_a_subscriber_may_be_there_long_before_the_publisher() -> None:
    found: list[Endpoints] = []

    async def resolve() -> Endpoints | None:
        return found[0] if found else None

    async with WeightSubscriber(FAST, resolve=resolve) as subscriber:
        waiting = asyncio.create_task(next_within(subscriber, None))
        with WeightPublisher(FAST) as publisher:
            found.append(publisher.start())
            publisher.publish(make_state(1))
            assert same(await waiting, make_state(1))


async def test_what_was_published_does_not_change_with_the_trainers_tensors() -> None:
    live = np.arange(5000, dtype=np.float32)
    held = live.data.cast("B")
    state = make_state(0)
    changing = replace(state, tensors={"a": replace(tensor(live, "float32"), data=held)})
    before = bytes(held)
    async with channel() as (publisher, subscriber):
        publisher.publish(changing)
        live += 1
        received = await next_within(subscriber, None)
    assert bytes(received.tensors["a"].data) == before


async def test_a_state_stays_as_it_is_while_someone_holds_it() -> None:
    async with channel() as (publisher, subscriber):
        held: list[WeightState] = []
        for version in range(6):
            publisher.publish(make_state(version))
            held.append(await next_within(subscriber, version - 1))
        assert all(same(state, make_state(version)) for version, state in enumerate(held))


async def test_memory_of_a_dropped_state_is_used_again() -> None:
    async with channel() as (publisher, subscriber):
        addresses = set()
        for version in range(6):
            publisher.publish(make_state(version))
            state = await next_within(subscriber, version - 1)
            addresses.add(np.frombuffer(state.tensors["layer"].data, np.uint8).ctypes.data)
    assert len(addresses) == 2  # the state in use, and the one being received


async def test_lost_announcements_only_delay() -> None:
    with WeightPublisher(FAST) as publisher:
        nowhere = replace(publisher.start(), announce="tcp://127.0.0.1:9")
        publisher.publish(make_state(1))
        async with WeightSubscriber(FAST, resolve=at(nowhere)) as subscriber:
            assert same(await next_within(subscriber, None), make_state(1))
            waiting = asyncio.create_task(next_within(subscriber, 1))
            await until(lambda: subscriber.stats.phase is Phase.VERSION)
            publisher.publish(make_state(2))
            assert same(await waiting, make_state(2))
            assert subscriber.stats.num_missed_announcements == 1


async def test_an_announcement_is_faster_than_the_poll() -> None:
    patient = FAST.model_copy(update={"poll_s": 600.0})
    async with channel(patient) as (publisher, subscriber):
        publisher.publish(make_state(1))
        await next_within(subscriber, None)
        waiting = asyncio.create_task(next_within(subscriber, 1))
        await until(lambda: subscriber.stats.phase is Phase.VERSION)
        publisher.publish(make_state(2))
        assert same(await waiting, make_state(2))


async def test_a_publisher_that_is_always_faster_starves_nobody() -> None:
    stop = threading.Event()
    held: list[int] = []

    def hammer(publisher: WeightPublisher) -> None:
        version = 0
        while not stop.is_set():
            publisher.publish(make_state(version, num_bytes=300_000))
            held.append(publisher.stats.num_held)
            version += 1

    async def follow(endpoints: Endpoints, credits: int) -> int:
        settings = FAST.model_copy(update={"credits": credits})
        last = None
        async with WeightSubscriber(settings, resolve=at(endpoints)) as subscriber:
            for _ in range(8):
                state = await next_within(subscriber, last)
                assert same(state, make_state(state.weight_version, num_bytes=300_000))
                assert last is None or state.weight_version > last
                last = state.weight_version
            return subscriber.stats.num_skipped

    with WeightPublisher(FAST) as publisher:
        endpoints = publisher.start()
        thread = threading.Thread(target=hammer, args=(publisher,))
        thread.start()
        try:
            skipped = await asyncio.gather(follow(endpoints, 1), follow(endpoints, 4))
        finally:
            stop.set()
            thread.join()
    assert min(skipped) > 0
    assert max(held) <= 2


async def test_a_receiver_that_stops_reading_keeps_tiles_alive_and_not_versions() -> None:
    context = zmq.Context()
    stuck = context.socket(zmq.DEALER)
    try:
        with WeightPublisher(FAST) as publisher:
            stuck.connect(publisher.start().tiles)
            for version in range(20):
                item = publisher.publish(make_state(version))
                stuck.send(Header(kind=Kind.GET_MANIFEST).pack())
                stuck.send(Header(kind=Kind.GET_TILE, version=version, root=item.root).pack())
            gc.collect()
            # Not isinstance: it asks every object for its class, and some of other libraries answer with a warning.
            alive = [item for item in gc.get_objects() if type(item) is WeightObject]
            assert len(alive) <= 2
    finally:
        stuck.close(linger=0)
        context.term()


async def test_a_cancelled_wait_leaves_a_subscriber_that_works() -> None:
    async with channel() as (publisher, subscriber):
        publisher.publish(make_state(0, num_bytes=2_000_000))
        for delay in (0.0, 0.001, 0.005, 0.02):
            waiting = asyncio.create_task(subscriber.next(None))
            await asyncio.wait([waiting], timeout=delay)
            waiting.cancel()
            await asyncio.wait([waiting])
        assert same(await next_within(subscriber, None), make_state(0, num_bytes=2_000_000))


async def test_the_event_loop_goes_on_while_many_small_tiles_come_in() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with channel() as (publisher, subscriber):
        publisher.publish(make_state(0, num_bytes=400_000))
        counting = asyncio.create_task(count())
        await next_within(subscriber, None)
        counting.cancel()
    assert turns > 400_000 // FAST.tile_bytes


async def test_a_version_that_is_not_newer_is_refused_and_the_old_one_goes_on() -> None:
    async with channel() as (publisher, subscriber):
        publisher.publish(make_state(3))
        for version in (3, 2):
            with pytest.raises(WeightError, match="not newer"):
                publisher.publish(replace(make_state(9), weight_version=version))
        assert same(await next_within(subscriber, None), make_state(3))


async def test_who_has_more_than_a_publisher_that_began_anew_says_so_and_takes_what_rises_above_it() -> None:
    async with channel() as (publisher, subscriber):
        publisher.publish(make_state(3))
        with capture_logs() as logs:
            waiting = asyncio.create_task(next_within(subscriber, 10))
            await until(lambda: bool(logs))
        assert [(entry["event"], entry["newest_there"], entry["newer_than"]) for entry in logs] == [
            ("weights_behind", 3, 10)
        ]
        publisher.publish(make_state(11))
        assert same(await waiting, make_state(11))
        for no_version in (-2, 3.0, "3"):
            with pytest.raises(ValueError, match="is no weight version"):
                await subscriber.next(no_version)  # type: ignore[arg-type]


async def test_nothing_is_left_after_closing_twice() -> None:
    async with channel() as (publisher, subscriber):
        publisher.publish(make_state(0))
        await next_within(subscriber, None)
        publisher.close()
        subscriber.close()
        assert "weight-publisher" not in {thread.name for thread in threading.enumerate()}


def test_neither_end_needs_torch_and_the_carriers_need_no_zeromq() -> None:
    code = (
        "import sys; from pipeline.weights import WeightState; assert 'zmq' not in sys.modules;"
        "from pipeline.weights import Relay, WeightPublisher, WeightSubscriber, create_publisher, create_subscriber;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=280)


def test_more_credits_than_a_publisher_queues_are_refused() -> None:
    with pytest.raises(ValueError, match="credits"):
        WeightSettings(credits=257)


def test_the_example_of_the_documentation_runs() -> None:
    text = (ROOT / "docs/protocol.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    done = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.PIPE, timeout=280)
    assert done.stdout == b"2 (2,)\n"
