"""Weights as they lie in host memory, without any framework.

In: bytes, dtype names and shapes. Out: carriers that publisher, subscriber and engines share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from pipeline.messages import Endpoints

__all__ = ["Endpoints", "HostTensor", "WeightKind", "WeightState"]


class WeightKind(StrEnum):
    """What an object holds."""

    SNAPSHOT = "snapshot"
    ADAPTER = "adapter"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostTensor:
    """One tensor. dtype: torch's name ("float32", "bfloat16"). data: C-contiguous bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightState:
    """All tensors of one version. kind: full weights, or the tensors of a LoRA adapter."""

    weight_version: int
    kind: WeightKind
    tensors: Mapping[str, HostTensor]

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(tensor.data.nbytes for tensor in self.tensors.values())
