"""What is decided over a whole step before its first micro-batch.

In: the samples of a step and, where the algorithm needs one, a survey of all their tokens. Out: the
advantage of every token, the factor of every completion and the limit of the correction; so none of
them can depend on how the step is split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.algorithms import Algorithm, with_process_rewards
from pipeline.batching import Sample
from pipeline.config import RewardSettings
from pipeline.learner.rewards import batch_shape, num_overlong, reward_batch
from pipeline.learner.survey import Survey
from pipeline.rewards.loading import name_rewards


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """advantages: of each completion [T]. factors: [N]. limit: of m2po. num_overlong: completions whose
    reward was shaped."""

    advantages: tuple[Tensor, ...]
    factors: Tensor
    limit: Tensor | None
    num_overlong: int

    def describe(self) -> dict[str, float]:
        """Mean advantages of the completions, and how many were too long."""
        means = torch.stack([row.mean() for row in self.advantages if len(row)] or [torch.zeros(())])
        return {
            "advantage_mean": float(means.mean()),
            "advantage_abs_mean": float(means.abs().mean()),
            "overlong_completions": float(self.num_overlong),
        }


def make_plan(
    algorithm: Algorithm, samples: Sequence[Sample], survey: Survey | None, *, weights: Mapping[str, float]
) -> Plan:
    """weights: of reward functions by name."""
    settings = algorithm.settings
    penalties = survey.penalties(algorithm) if survey is not None else None
    batch = reward_batch(samples, settings, weights=weights, penalties=penalties)
    advantages = with_process_rewards(batch, algorithm.advantage(batch, settings), settings)  # [M]
    return Plan(
        advantages=torch.split(advantages, batch.lengths.tolist()),
        factors=algorithm.aggregation(batch_shape(samples), settings),
        limit=survey.limit(algorithm, advantages) if survey is not None else None,
        num_overlong=num_overlong(samples, settings),
    )


def reward_weights(rewards: Sequence[RewardSettings]) -> dict[str, float]:
    """Weight of each reward function, by the name that scores have it under."""
    return {reward.name: reward.weight for reward in name_rewards(rewards)} if rewards else {}
