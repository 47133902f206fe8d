"""A thousand versions in a row over a line that spoils messages, between ends that come and go."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from pipeline.weights import Endpoints, WeightPublisher, WeightSubscriber
from pipeline.weights.subscriber_stats import SubscriberStats
from tests.weights.chaos import chaos
from tests.weights.drift import drifted
from tests.weights.states import FAST, next_within, same

NUM_VERSIONS = 1000
SETTINGS = FAST.model_copy(update={"encoding": "delta", "tile_bytes": 16_384, "poll_s": 0.02})


@pytest.mark.timeout(900)
async def test_every_state_of_a_thousand_is_the_trainers_to_the_last_bit() -> None:
    dice, served, refused, corrupt, patched = random.Random(7), 0, 0, 0, 0
    current: list[Endpoints] = []

    async def resolve() -> Endpoints:
        return current[-1]

    def count(stats: SubscriberStats) -> None:
        nonlocal refused, corrupt, patched
        refused, corrupt, patched = (
            refused + stats.num_refused, corrupt + stats.num_corrupt_tiles, patched + stats.num_patched,
        )  # fmt: skip

    async with chaos(seed=7, rate=0.02) as between:

        def begin() -> WeightPublisher:
            made = WeightPublisher(SETTINGS)
            endpoints = made.start()
            between.aim(endpoints.tiles)
            current.append(replace(endpoints, tiles=between.address))
            return made

        publisher, subscriber = begin(), WeightSubscriber(SETTINGS, resolve=resolve)
        last = None
        for version in range(NUM_VERSIONS):
            if dice.random() < 0.01:
                publisher.close()
                publisher = begin()
            if dice.random() < 0.01:
                count(subscriber.stats)
                subscriber.close()
                subscriber, last = WeightSubscriber(SETTINGS, resolve=resolve), None
            await asyncio.to_thread(publisher.publish, drifted(version))
            if dice.random() < 0.2:
                continue  # it misses a few and gets what they changed together
            if dice.random() < 0.05:
                waiting = asyncio.create_task(subscriber.next(last))
                await asyncio.wait([waiting], timeout=dice.random() * 0.01)
                waiting.cancel()
                await asyncio.wait([waiting])
            state = await next_within(subscriber, last)
            assert same(state, drifted(state.weight_version))
            assert state.weight_version == version
            last, served = version, served + 1
        count(subscriber.stats)
        subscriber.close()
        publisher.close()
        assert between.num_faults > 100
    assert served > 700
    assert patched > 600
    assert corrupt + refused > 10
