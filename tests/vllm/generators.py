"""Generators of one run on engines of the test's own: claims, weights and labels as in their processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from pipeline.config import Config
from pipeline.engines import GenerationEngine
from pipeline.feeder import prompt_entry
from pipeline.keys import Stream
from pipeline.messages import RolloutGroup
from pipeline.metrics import Metrics
from pipeline.streams import Streams, connect
from pipeline.weights import WeightPublisher, WeightState
from pipeline.wire import decode
from pipeline.worker.arrival import Arrival
from pipeline.worker.context import WorkerContext
from pipeline.worker.state import WorkerState
from pipeline.worker.turns import DeviceTurn
from tests.engines.conftest import group_of
from workers.generator import generate


@dataclass(eq=False)
class Generators:
    """contexts: by the name of a generator, which is its worker id. rollouts: all that came out so far."""

    contexts: Mapping[str, WorkerContext]
    publisher: WeightPublisher
    streams: Streams
    rollouts: list[RolloutGroup] = field(default_factory=list)
    _num_fed: int = 0

    async def publish(self, state: WeightState) -> None:
        """As the trainer does it."""
        await next(iter(self.contexts.values())).fleet.set_version(state.weight_version)
        await asyncio.to_thread(self.publisher.publish, state)

    async def complete(self, number: int) -> list[RolloutGroup]:
        """Feed so many groups and wait for all of them."""
        groups = [group_of([5, 6, 7], ordinal=self._num_fed + index, max_tokens=60) for index in range(number)]
        entries = [prompt_entry(group, ordinal=group.ordinal) for group in groups]
        assert await self.streams.feed(entries, limit=10_000) == number
        self._num_fed += number
        before = len(self.rollouts)
        while len(self.rollouts) < self._num_fed:
            leases = await self.streams.claim(Stream.ROLLOUTS, number, block_s=1.0)
            self.rollouts += [decode(lease.payload, RolloutGroup) for lease in leases]
        return self.rollouts[before:]


@asynccontextmanager
async def generating(
    config: Config, engines: Mapping[str, GenerationEngine], first: WeightState
) -> AsyncIterator[Generators]:
    """Generators on these engines, which were started, and a publisher that offers `first`."""
    async with connect(config.redis) as redis:
        contexts: dict[str, WorkerContext] = {}
        with WeightPublisher(config.weights) as publisher:
            endpoints = publisher.start()
            for name in engines:
                state = WorkerState("generator", name)
                metrics = Metrics(config.run.name, "generator", name)
                context = await Arrival(config, state, metrics, "", joins=True).enter(redis)
                assert context is not None
                contexts[name] = context
                await context.fleet.set_endpoints(endpoints)
            streams = Streams(redis, context.keys, config.queues, consumer="test")
            crew = Generators(contexts=contexts, publisher=publisher, streams=streams)
            await crew.publish(first)
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(generate(contexts[name], engine, DeviceTurn(contexts[name])))
                    for name, engine in engines.items()
                ]
                yield crew
                for task in tasks:
                    task.cancel()
