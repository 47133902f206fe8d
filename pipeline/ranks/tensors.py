"""Tensors that may be spread over ranks, seen as what they are together, or as what lies here.

In: a tensor, or torch's DTensor. Out: a plain tensor. Imports nothing that a process without ranks
would not need.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def is_spread(tensor: Tensor) -> bool:
    """Whether others have parts of it."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """All of it, on each rank; all have to ask."""
    spread: Any = tensor
    gathered: Tensor = spread.full_tensor() if is_spread(tensor) else tensor
    return gathered


def local_part(tensor: Tensor) -> Tensor:
    """What lies on this rank."""
    spread: Any = tensor
    part: Tensor = spread.to_local() if is_spread(tensor) else tensor
    return part


def spread_as(like: Tensor, part: Tensor) -> Tensor:
    """A tensor that is spread as `like` is, from what lies of it on each rank."""
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor), "only what is spread has parts"
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
