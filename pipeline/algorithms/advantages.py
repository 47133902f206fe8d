"""Rewards become advantages inside their group.

In: the rewards of a whole step. Out: one number for each completion, [N] float64. A completion
without a reward stays out of the baseline and gets 0; so does one that is alone in its group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.algorithms.carriers import AdvantageFunction, RewardBatch
from pipeline.config import AlgorithmSettings

_STD_FLOOR = 1e-6


def group_mean_std(batch: RewardBatch, settings: AlgorithmSettings) -> Tensor:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-6) over the scored members of i's group.

    std divides by the number of members. Source: GRPO, arXiv 2402.03300.
    """
    centred = group_mean(batch, settings)
    variance = _group_mean(centred.square(), batch)
    return centred / (variance.sqrt() + _STD_FLOOR)


def group_mean(batch: RewardBatch, settings: AlgorithmSettings) -> Tensor:
    """A_i = r_i - mean(r) over the scored members of i's group.

    Leaves hard and easy prompts their natural weight. Source: Dr. GRPO, arXiv 2503.20783.
    """
    centred = batch.rewards - _group_mean(batch.rewards, batch)
    return torch.where(batch.is_scored & ~_is_constant(batch), centred, 0.0)


def _group_mean(values: Tensor, batch: RewardBatch) -> Tensor:
    """Mean of the scored members' values [N] in each member's group, [N]; 0 without any."""
    num_groups = int(batch.group_index.max()) + 1 if len(batch.group_index) else 0
    scored = batch.is_scored.to(values.dtype)
    sums = values.new_zeros(num_groups).index_add(0, batch.group_index, values * scored)
    counts = values.new_zeros(num_groups).index_add(0, batch.group_index, scored)
    return (sums / counts.clamp(min=1.0))[batch.group_index]


def _is_constant(batch: RewardBatch) -> Tensor:
    """Whether all scored members of each member's group have one reward, [N] bool.

    Compared, not computed: the mean of equal numbers may differ from them in the last bit.
    """
    num_groups = int(batch.group_index.max()) + 1 if len(batch.group_index) else 0
    high = torch.where(batch.is_scored, batch.rewards, -torch.inf)
    low = torch.where(batch.is_scored, batch.rewards, torch.inf)
    highest = high.new_full((num_groups,), -torch.inf).scatter_reduce(0, batch.group_index, high, "amax")
    lowest = low.new_full((num_groups,), torch.inf).scatter_reduce(0, batch.group_index, low, "amin")
    return (highest <= lowest)[batch.group_index]


ADVANTAGES: dict[str, AdvantageFunction] = {"group_mean_std": group_mean_std, "group_mean": group_mean}
