"""A receiver takes no more than it may."""

from __future__ import annotations

import time

from pipeline.weights import WeightPublisher, WeightSubscriber
from pipeline.weights.throttle import Throttle
from tests.weights.states import FAST, at, make_state, next_within, same


def test_what_was_ordered_is_waited_for_at_the_rate() -> None:
    throttle = Throttle(1000.0)
    delays = [throttle.delay_s(100, now=5.0) for _ in range(4)]
    assert [round(delay, 3) for delay in delays] == [0.0, 0.05, 0.15, 0.25]
    assert throttle.delay_s(100, now=100.0) == 0.0, "what was not used is not saved up"
    assert round(throttle.delay_s(100, now=100.0), 3) == 0.05


def test_without_a_limit_nothing_waits() -> None:
    throttle = Throttle(0.0)
    assert {throttle.delay_s(1 << 40, now=0.0) for _ in range(3)} == {0.0}


async def test_a_transfer_takes_as_long_as_its_limit_says_and_arrives_whole() -> None:
    limited = FAST.model_copy(update={"max_mbit_per_s": 8.0})  # a million bytes a second
    with WeightPublisher(FAST) as publisher:
        async with WeightSubscriber(limited, resolve=at(publisher.start())) as subscriber:
            publisher.publish(make_state(0, num_bytes=300_000))
            started = time.monotonic()
            assert same(await next_within(subscriber, None), make_state(0, num_bytes=300_000))
            assert time.monotonic() - started > 0.2
