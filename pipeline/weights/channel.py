"""Which weight channel the settings name: what its two ends can do, and where they come from."""

from __future__ import annotations

from typing import Protocol

from pipeline.config import WeightSettings
from pipeline.weights.address_watch import Resolve
from pipeline.weights.publisher import PublisherStats, WeightPublisher
from pipeline.weights.state import Endpoints, WeightState
from pipeline.weights.subscriber import SubscriberStats, WeightSubscriber


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


def create_publisher(settings: WeightSettings) -> Publisher:
    """The trainer's end of the channel. Raises ConfigError."""
    return WeightPublisher(settings)


def create_subscriber(settings: WeightSettings, resolve: Resolve) -> Subscriber:
    """A generator's end of the channel. Raises ConfigError."""
    return WeightSubscriber(settings, resolve=resolve)
