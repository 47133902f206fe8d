"""Who receives weights in a process, for itself or for all of its machine.

In: settings, and where the publisher is. Out: a receiver of the channel that the settings name. A publisher that
uses another one is told of and taken for none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pipeline.config import WeightSettings
from pipeline.logs import get_logger
from pipeline.weights.address_watch import Resolve
from pipeline.weights.memory import BufferPool, Pool
from pipeline.weights.relay import Relay
from pipeline.weights.state import Endpoints, WeightState
from pipeline.weights.store.subscriber import StoreSubscriber
from pipeline.weights.subscriber import WeightSubscriber
from pipeline.weights.subscriber_stats import SubscriberStats
from pipeline.weights.transfer import Content

log = get_logger()


class Subscriber(Protocol):
    """A generator's end of the channel."""

    async def next(self, newer_than: int | None) -> WeightState:
        """The newest version above `newer_than` (None: any), verified. Waits as long as it must."""

    @property
    def is_receiving(self) -> bool:
        """Whether this process receives by itself, and not another one of this machine for it."""

    @property
    def stats(self) -> SubscriberStats:
        """A copy of the figures."""

    def close(self) -> None:
        """End. Safe to call twice."""


class Receiver(Subscriber, Protocol):
    """A subscriber that also gives what it has received as it lies in memory."""

    async def next_content(self, newer_than: int | None) -> Content:
        """The same as it lies in memory."""

    def start_from(self, content: Content) -> None:
        """Patches may start from a version that came another way."""


def create_receiver(
    settings: WeightSettings,
    resolve: Resolve,
    *,
    make_pool: Callable[[int], Pool] = BufferPool,
    relay: Relay | None = None,
) -> Receiver:
    """A receiver for this process alone. make_pool: where versions are received. Raises ConfigError.

    relay: passes on what comes over ZeroMQ.
    """
    suitable = _Suitable(settings, resolve)
    if settings.store:
        return StoreSubscriber(settings, resolve=suitable, make_pool=make_pool)
    return WeightSubscriber(settings, resolve=suitable, make_pool=make_pool, relay=relay)


class _Suitable:
    """The publisher's address, where it uses the channel that this end's settings name."""

    def __init__(self, settings: WeightSettings, resolve: Resolve) -> None:
        self._settings = settings
        self._resolve = resolve
        self._told: Endpoints | None = None

    async def __call__(self) -> Endpoints | None:
        endpoints = await self._resolve()
        if endpoints is None or bool(endpoints.folder) == bool(self._settings.store):
            return endpoints
        if endpoints != self._told:
            way = "into a store" if endpoints.folder else "over ZeroMQ"
            log.error(
                "weights_elsewhere",
                reason=f"the trainer publishes {way}, and weights.store = {self._settings.store!r} here",
                way_out="set weights.store for trainer and generators alike",
            )
        self._told = endpoints
        return None
