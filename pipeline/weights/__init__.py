"""The way back from trainer to generators: immutable, versioned, verified weight objects.

In: host tensors under a version. Out: the same tensors in another process, every byte verified
before anyone sees it. Versions are skipped when a reader is slow; the writer never waits.
"""

from __future__ import annotations

from pipeline.weights.state import Endpoints, HostTensor, WeightKind, WeightState

__all__ = ["Endpoints", "HostTensor", "WeightKind", "WeightState"]
