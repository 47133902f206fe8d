"""Which weight channel the settings name: what its two ends can do, and where they come from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pipeline.config import WeightSettings
from pipeline.logs import get_logger
from pipeline.weights.address_watch import Resolve
from pipeline.weights.state import Endpoints, WeightState
from pipeline.weights.subscriber_stats import SubscriberStats

if TYPE_CHECKING:
    from pipeline.weights.publisher import PublisherStats

log = get_logger()


class Publisher(Protocol):
    """The trainer's end."""

    def start(self) -> Endpoints:
        """Be there for subscribers, who find it by what is returned. Raises ConfigError."""

    def publish(self, state: WeightState) -> object:
        """Offer a version, and return as soon as the caller may change its tensors. Raises WeightError."""

    @property
    def stats(self) -> PublisherStats:
        """Figures since the start."""

    def close(self) -> None:
        """End. Safe to call twice."""


class Subscriber(Protocol):
    """A generator's end."""

    async def next(self, newer_than: int | None) -> WeightState:
        """The newest version above `newer_than` (None: any), verified. Waits as long as it must."""

    @property
    def stats(self) -> SubscriberStats:
        """A copy of the figures."""

    def close(self) -> None:
        """End. Safe to call twice."""


def create_publisher(settings: WeightSettings, *, run: str) -> Publisher:
    """The trainer's end of the channel. run: tells it from all others in a store. Raises ConfigError."""
    if settings.store:
        from pipeline.weights.store.publisher import StorePublisher

        return StorePublisher(settings, run=run)
    from pipeline.weights.publisher import WeightPublisher

    return WeightPublisher(settings)


def create_subscriber(settings: WeightSettings, resolve: Resolve) -> Subscriber:
    """A generator's end of the channel. Raises ConfigError."""
    resolve = _Suitable(settings, resolve)
    if settings.store:
        from pipeline.weights.store.subscriber import StoreSubscriber

        return StoreSubscriber(settings, resolve=resolve)
    from pipeline.weights.subscriber import WeightSubscriber

    return WeightSubscriber(settings, resolve=resolve)


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
