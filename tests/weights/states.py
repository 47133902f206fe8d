"""Weight states whose content tells their version, and what it takes to receive them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import numpy as np

from pipeline.config import WeightSettings
from pipeline.weights import Endpoints, HostTensor, WeightKind, WeightPublisher, WeightState, WeightSubscriber

DEADLINE_S = 120
FAST = WeightSettings(poll_s=0.1, tile_bytes=4096, credits=4)


def tensor(values: object, dtype: str, shape: tuple[int, ...] | None = None) -> HostTensor:
    """A numpy array as a host tensor of torch's `dtype`."""
    array = np.ascontiguousarray(values)
    data = memoryview(array.tobytes())
    return HostTensor(dtype=dtype, shape=array.shape if shape is None else shape, data=data)


def make_state(version: int, *, num_bytes: int = 40_000) -> WeightState:
    """Two tensors of pseudo-random bytes that depend on the version and on nothing else."""
    content = np.random.default_rng(version).integers(0, 256, num_bytes, dtype=np.uint8)
    return WeightState(
        weight_version=version,
        kind=WeightKind.SNAPSHOT,
        tensors={"norm": tensor(content[:100], "uint8"), "layer": tensor(content[100:], "uint8")},
    )


def same(left: WeightState, right: WeightState) -> bool:
    """Whether two states are equal to the last bit, names, dtypes and shapes included."""
    return _described(left) == _described(right)


def checksum(state: WeightState) -> str:
    """The same for states that are equal to the last bit, in whatever process."""
    return hashlib.sha256(repr(_described(state)).encode()).hexdigest()


def _described(state: WeightState) -> tuple[object, ...]:
    tensors = [(name, item.dtype, item.shape, bytes(item.data)) for name, item in state.tensors.items()]
    return state.weight_version, state.kind, tensors


async def next_within(subscriber: WeightSubscriber, newer_than: int | None, seconds: float = DEADLINE_S) -> WeightState:
    """`subscriber.next`, with a deadline."""
    async with asyncio.timeout(seconds):
        return await subscriber.next(newer_than)


async def until(condition: Callable[[], bool]) -> None:
    """Return when `condition` holds; fail after the deadline."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110  what it looks at belongs to other threads
            await asyncio.sleep(0.001)  # they need the interpreter for that


def at(endpoints: Endpoints | None) -> Callable[[], Awaitable[Endpoints | None]]:
    """A resolver that always gives the same answer."""

    async def resolve() -> Endpoints | None:
        return endpoints

    return resolve


@asynccontextmanager
async def channel(
    settings: WeightSettings = FAST,
) -> AsyncIterator[tuple[WeightPublisher, WeightSubscriber]]:
    """A publisher and one subscriber that knows where it is."""
    with WeightPublisher(settings) as publisher:
        async with WeightSubscriber(settings, resolve=at(publisher.start())) as subscriber:
            yield publisher, subscriber
