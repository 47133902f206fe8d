"""Sums and means inside the groups of a batch.

In: values of completions and the groups they belong to. Out: a number of each group, at every member.
"""

from __future__ import annotations

import torch
from torch import Tensor

STD_FLOOR = 1e-6


def group_sum(values: Tensor, group_index: Tensor) -> Tensor:
    """Sum of each member's group [N], [N]."""
    return values.new_zeros(_num_groups(group_index)).index_add(0, group_index, values)[group_index]


def group_mean(values: Tensor, is_present: Tensor, group_index: Tensor) -> Tensor:
    """Mean of the values [N] that are present in each member's group, [N]; 0 without any."""
    present = is_present.to(values.dtype)
    return group_sum(values * present, group_index) / group_sum(present, group_index).clamp(min=1.0)


def centred(values: Tensor, is_present: Tensor, group_index: Tensor) -> Tensor:
    """Values less the mean of their group, [N]; exactly 0 where not present, or where all are equal."""
    differences = values - group_mean(values, is_present, group_index)
    return torch.where(is_present & ~is_constant(values, is_present, group_index), differences, 0.0)


def standardised(values: Tensor, is_present: Tensor, group_index: Tensor) -> Tensor:
    """`centred` over the standard deviation of the group (dividing by its members) + 1e-6, [N]."""
    differences = centred(values, is_present, group_index)
    return differences / (group_mean(differences.square(), is_present, group_index).sqrt() + STD_FLOOR)


def is_constant(values: Tensor, is_present: Tensor, group_index: Tensor) -> Tensor:
    """Whether all values that are present in each member's group are equal, [N] bool.

    Compared, not computed: the mean of equal numbers may differ from them in the last bit.
    """
    high = torch.where(is_present, values, -torch.inf)
    low = torch.where(is_present, values, torch.inf)
    num_groups = _num_groups(group_index)
    highest = high.new_full((num_groups,), -torch.inf).scatter_reduce(0, group_index, high, "amax")
    lowest = low.new_full((num_groups,), torch.inf).scatter_reduce(0, group_index, low, "amin")
    return (highest <= lowest)[group_index]


def _num_groups(group_index: Tensor) -> int:
    return int(group_index.max()) + 1 if len(group_index) else 0
