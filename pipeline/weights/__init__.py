"""The way back from trainer to generators: immutable, versioned, verified weight objects.

In: host tensors under a version. Out: the same tensors in another process, every byte verified
before anyone sees it. Versions are skipped when a reader is slow; the writer never waits.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from pipeline.weights.state import Endpoints, HostTensor, WeightKind, WeightState

if TYPE_CHECKING:
    from pipeline.weights.channel import create_publisher, create_subscriber
    from pipeline.weights.publisher import WeightPublisher
    from pipeline.weights.relay import Relay
    from pipeline.weights.subscriber import WeightSubscriber

__all__ = [
    "Endpoints",
    "HostTensor",
    "Relay",
    "WeightKind",
    "WeightPublisher",
    "WeightState",
    "WeightSubscriber",
    "create_publisher",
    "create_subscriber",
]

_MODULES = {
    "Relay": "relay",
    "WeightPublisher": "publisher",
    "WeightSubscriber": "subscriber",
    "create_publisher": "channel",
    "create_subscriber": "channel",
}


def __getattr__(name: str) -> object:
    """The ends of the channel are imported when asked for: the carriers need no ZeroMQ."""
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
