"""What can be said about the groups of a step without looking at the policy.

In: scored groups and their assessments. Out: metrics as plain floats. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.filters import is_unscored, is_zero_variance, rewards_of
from pipeline.messages import ScoredGroup
from pipeline.staleness import Assessment


def in_feeding_order(groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
    """Groups in the order they were fed, so that arrival order changes nothing."""
    return sorted(groups, key=lambda group: (group.rollout.prompt.ordinal, group.rollout.prompt.group_id))


def describe_groups(groups: Sequence[ScoredGroup], assessments: Sequence[Assessment]) -> dict[str, float]:
    """Rewards, lengths and ages of one step."""
    rewards = np.array(
        [reward for group in groups for reward in rewards_of(group) if reward is not None], dtype=np.float64
    )
    lengths = np.array(
        [len(completion) for group in groups for completion in group.rollout.completions], dtype=np.int64
    )
    spans = [completion.spans for group in groups for completion in group.rollout.completions]
    num_tokens = sum(assessment.num_tokens for assessment in assessments)
    summed_age = sum(assessment.mean_age * assessment.num_tokens for assessment in assessments)
    return {
        "groups": float(len(groups)),
        "completions": float(len(lengths)),
        "tokens": float(num_tokens),
        "reward_mean": float(rewards.mean()) if len(rewards) else 0.0,
        "reward_std": float(rewards.std()) if len(rewards) else 0.0,
        "completion_length_mean": float(lengths.mean()) if len(lengths) else 0.0,
        "completion_length_max": float(lengths.max(initial=0)),
        "mixed_completions": float(sum(len(versions) > 1 for versions in spans)),
        "unscored_completions": float(len(lengths) - len(rewards)),
        "unscored_groups": float(sum(is_unscored(group) for group in groups)),
        "zero_variance_groups": float(sum(is_zero_variance(group) for group in groups)),
        "staleness_mean": summed_age / num_tokens if num_tokens else 0.0,
        "staleness_max": float(max((assessment.max_age for assessment in assessments), default=0)),
        "stale_tokens": float(sum(assessment.num_over for assessment in assessments)),
        "corrected_tokens": float(sum(assessment.num_corrected for assessment in assessments)),
        "masked_tokens": float(sum(assessment.num_masked for assessment in assessments)),
    }
