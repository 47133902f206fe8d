"""The way back from trainer to generators: immutable, versioned, verified weight objects.

In: host tensors under a version. Out: the same tensors in another process, every byte verified
before anyone sees it. Versions are skipped when a reader is slow; the writer never waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.weights.state import Endpoints, HostTensor, WeightKind, WeightState

if TYPE_CHECKING:
    from pipeline.weights.publisher import WeightPublisher
    from pipeline.weights.subscriber import WeightSubscriber

__all__ = [
    "Endpoints",
    "HostTensor",
    "WeightKind",
    "WeightPublisher",
    "WeightState",
    "WeightSubscriber",
]


def __getattr__(name: str) -> object:
    """The two ends of the channel are imported when asked for: the carriers need no ZeroMQ."""
    if name == "WeightPublisher":
        from pipeline.weights.publisher import WeightPublisher

        return WeightPublisher
    if name == "WeightSubscriber":
        from pipeline.weights.subscriber import WeightSubscriber

        return WeightSubscriber
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
