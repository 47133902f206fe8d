"""Advantages that are normalised over the whole batch, not inside a group alone.

In: the rewards of a whole step. Out: a number for each token, [M] float64; 0 in completions without
a reward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.algorithms import groups
from pipeline.algorithms.carriers import RewardBatch
from pipeline.config import AlgorithmSettings


def reinforce_pp(batch: RewardBatch, settings: AlgorithmSettings) -> Tensor:
    """A_t = (R_t - mean(R)) / (std(R) + 1e-6) over all trained tokens of the batch.

    R_t = r_i - sum over s >= t of the penalties (the KL term, where it is in the reward). A single
    completion for each prompt is enough. Source: REINFORCE++, arXiv 2501.03262.
    """
    return _whitened(batch.spread(batch.rewards) - _to_come(batch), batch)


def reinforce_pp_baseline(batch: RewardBatch, settings: AlgorithmSettings) -> Tensor:
    """`reinforce_pp` with r_i - mean(r) over i's group in place of r_i. Source: arXiv 2501.03262."""
    differences = groups.centred(batch.rewards, batch.is_scored, batch.group_index)
    return _whitened(batch.spread(differences) - _to_come(batch), batch)


def gdpo(batch: RewardBatch, settings: AlgorithmSettings) -> Tensor:
    """A_i = S_i / (std(S) + 1e-6), S_i = sum_k w_k (r_ki - mean_k) / (std_k + 1e-6) inside i's group.

    Each reward function is normalised apart, so that one of large spread does not drown the others;
    std(S) is over the scored completions of the batch, whose mean is 0 already. Shaping and penalties
    count as one more function of weight 1 that is not normalised. Source: GDPO, arXiv 2601.05242.
    """
    summed = torch.zeros_like(batch.rewards)
    for index, weight in enumerate(batch.part_weights):
        is_present = batch.has_part[:, index] & batch.is_scored
        summed = summed + weight * groups.standardised(batch.parts[:, index], is_present, batch.group_index)
    others = batch.shaping + batch.outcomes - batch.rewards
    summed = summed + groups.centred(others, batch.is_scored, batch.group_index)
    num_scored = batch.is_scored.sum().clamp(min=1)
    spread = (summed.square().sum() / num_scored).sqrt()
    return batch.spread(summed / (spread + groups.STD_FLOOR))


def to_come(values: Tensor, lengths: Tensor) -> Tensor:
    """Sum of each token's value [M] and of those after it in the same completion, [M]."""
    parts = [part.flip(0).cumsum(0).flip(0) for part in torch.split(values, lengths.tolist())]
    return torch.cat(parts) if parts else values


def _to_come(batch: RewardBatch) -> Tensor:
    if batch.penalties is None:
        return batch.mask.new_zeros(len(batch.mask), dtype=torch.float64)
    return to_come(batch.penalties * batch.mask, batch.lengths)


def _whitened(values: Tensor, batch: RewardBatch) -> Tensor:
    """Mean 0 and spread 1 over the trained tokens of scored completions; exactly 0 where all are equal."""
    is_trained = batch.mask & batch.spread(batch.is_scored)
    trained = values[is_trained]
    if not len(trained) or trained.max() <= trained.min():
        return torch.zeros_like(values)
    differences = values - trained.mean()
    deviation = differences[is_trained].square().mean().sqrt()
    return torch.where(batch.spread(batch.is_scored), differences / (deviation + groups.STD_FLOOR), 0.0)
