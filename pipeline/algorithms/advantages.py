"""Rewards become advantages inside their group.

In: the rewards of a whole step. Out: a number for each token, [M] float64. A completion without a
reward stays out of the baseline and gets 0; so does one that is alone in its group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.algorithms import groups
from pipeline.algorithms.batch_advantages import gdpo, reinforce_pp, reinforce_pp_baseline
from pipeline.algorithms.carriers import AdvantageFunction, RewardBatch
from pipeline.config import AlgorithmSettings


def group_mean_std(batch: RewardBatch, settings: AlgorithmSettings) -> Tensor:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-6) over the scored members of i's group.

    std divides by the number of members. Source: GRPO, arXiv 2402.03300.
    """
    return batch.spread(groups.standardised(batch.outcomes, batch.is_scored, batch.group_index))


def group_mean(batch: RewardBatch, settings: AlgorithmSettings) -> Tensor:
    """A_i = r_i - mean(r) over the scored members of i's group.

    Leaves hard and easy prompts their natural weight. Source: Dr. GRPO, arXiv 2503.20783.
    """
    return batch.spread(groups.centred(batch.outcomes, batch.is_scored, batch.group_index))


def rloo(batch: RewardBatch, settings: AlgorithmSettings) -> Tensor:
    """A_i = r_i - mean of the other scored members of i's group = n / (n - 1) (r_i - mean(r)).

    The baseline does not depend on i, so the gradient is unbiased. Source: RLOO, arXiv 2402.14740.
    """
    num_members = groups.group_sum(batch.is_scored.double(), batch.group_index)
    differences = groups.centred(batch.outcomes, batch.is_scored, batch.group_index)
    return batch.spread(differences * num_members / (num_members - 1.0).clamp(min=1.0))


def maxrl(batch: RewardBatch, settings: AlgorithmSettings) -> Tensor:
    """A_i = (r_i - mean(r)) / mean(r) over the scored members of i's group; 0 where the mean is not positive.

    With rewards of 0 and 1 its expectation is the gradient of log(probability of success), up to a
    term that more members make small: rare successes weigh most. Shaping and penalties belong to r_i, and
    not to what is divided by, which is the share of successes and would come near 0 with them.
    Source: MaxRL, arXiv 2602.02710.
    """
    mean = groups.group_mean(batch.rewards - batch.shaping, batch.is_scored, batch.group_index)
    differences = groups.centred(batch.outcomes, batch.is_scored, batch.group_index)
    is_positive = mean > groups.STD_FLOOR
    return batch.spread(torch.where(is_positive, differences / torch.where(is_positive, mean, 1.0), 0.0))


def opo(batch: RewardBatch, settings: AlgorithmSettings) -> Tensor:
    """A_i = r_i - sum_j T_j r_j / sum_j T_j over the scored members of i's group with T_j trained tokens.

    The baseline of least variance where the squared gradient of a completion grows with its length.
    Source: OPO, arXiv 2505.23585.
    """
    lengths = batch.num_tokens * batch.is_scored.double()
    total = groups.group_sum(lengths, batch.group_index).clamp(min=1.0)
    baseline = groups.group_sum(lengths * batch.outcomes, batch.group_index) / total
    is_constant = groups.is_constant(batch.outcomes, batch.is_scored, batch.group_index)
    return batch.spread(torch.where(batch.is_scored & ~is_constant, batch.outcomes - baseline, 0.0))


def none(batch: RewardBatch, settings: AlgorithmSettings) -> Tensor:
    """A_i = 0: rewards are reported and teach nothing, as where a teacher alone is learnt from."""
    return batch.mask.new_zeros(len(batch.mask), dtype=torch.float64)


ADVANTAGES: dict[str, AdvantageFunction] = {
    "group_mean_std": group_mean_std,
    "group_mean": group_mean,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "maxrl": maxrl,
    "gdpo": gdpo,
    "opo": opo,
    "none": none,
}
