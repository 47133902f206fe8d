"""Rewards of single tokens or steps become a part of the advantages.

In: the advantages of whole outcomes and a batch whose scores have token rewards. Out: advantages of
tokens, [M]. A token's reward is NaN where no step ends; a completion without any keeps its outcome.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.algorithms import groups
from pipeline.algorithms.batch_advantages import to_come
from pipeline.algorithms.carriers import RewardBatch
from pipeline.config import AlgorithmSettings


def with_process_rewards(batch: RewardBatch, advantages: Tensor, settings: AlgorithmSettings) -> Tensor:
    """A_t + w P_t, with z = (step reward - mean) / (std + 1e-6) over all steps of the group.

    returns: P_t = sum of the z of the steps that end at t or later, as in the process supervision
    of GRPO, arXiv 2402.03300.
    align: P_t = z of the step that t belongs to, less its mean over the completion, so that the mean
    of a completion's advantages stays that of its outcome; after PRPO, arXiv 2601.07182.
    """
    if settings.process == "none" or batch.token_rewards is None:
        return advantages
    is_step_end = torch.isfinite(batch.token_rewards) & batch.mask & batch.spread(batch.is_scored)
    rewards = torch.where(is_step_end, batch.token_rewards, 0.0)
    steps = groups.standardised(rewards, is_step_end, batch.spread(batch.group_index))  # [M], 0 between steps
    part = to_come(steps, batch.lengths) if settings.process == "returns" else _aligned(steps, is_step_end, batch)
    return advantages + settings.process_weight * part


def _aligned(steps: Tensor, is_step_end: Tensor, batch: RewardBatch) -> Tensor:
    """Each token's step reward [M] less its mean over the completion's tokens that belong to a step."""
    values = torch.zeros_like(steps)
    belongs = torch.zeros_like(is_step_end)
    start = 0
    for length in batch.lengths.tolist():
        ends = is_step_end[start : start + length].nonzero().squeeze(1)
        if len(ends):
            last = int(ends[-1]) + 1
            step_of = torch.searchsorted(ends, torch.arange(last))
            values[start : start + last] = steps[start + ends][step_of]
            belongs[start : start + last] = True
        start += length
    belongs = belongs & batch.mask
    counts = batch.sum_of(belongs.double()).clamp(min=1.0)
    means = batch.sum_of(values * belongs) / counts
    return torch.where(belongs, values - batch.spread(means), 0.0)
