"""Weights that drift as in training: from version to version a few of many numbers change a little."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from pipeline.weights import HostTensor, WeightKind, WeightState

SIZES = {"embed": 40_000, "norm": 100, "layer": 60_000, "odd": 7}
DENSITY = 0.01  # of the numbers change from version to version


@lru_cache(maxsize=4)
def numbers(version: int) -> npt.NDArray[np.uint16]:
    """All numbers of a version, as bit patterns of bfloat16."""
    generator = np.random.default_rng(version)
    if version == 0:
        return (generator.standard_normal(sum(SIZES.values())).astype(np.float32).view(np.uint32) >> 16).astype("<u2")
    before = numbers(version - 1)
    after = before.copy()
    where = generator.random(len(after)) < DENSITY
    after[where] += generator.choice(np.array([1, 2, 0xFFFF], dtype=np.uint16), int(where.sum()))
    return after


def drifted(version: int, *, name: str = "layer") -> WeightState:
    """A version as a trainer publishes it. name: of the third tensor."""
    content, tensors, start = numbers(version), {}, 0
    for key, size in SIZES.items():
        part = content[start : start + size]
        shape = (size // 10, 10) if size % 10 == 0 else (size,)
        tensors[name if key == "layer" else key] = HostTensor(
            dtype="bfloat16", shape=shape, data=memoryview(part.tobytes())
        )
        start += size
    return WeightState(weight_version=version, kind=WeightKind.SNAPSHOT, tensors=tensors)
