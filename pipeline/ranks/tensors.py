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
