"""Which groups teach nothing, and why.

In: a scored group. Out: yes or no for one reason; the trainer decides what to do about it. Works
on the carriers alone, so that any process can ask.
"""

from __future__ import annotations

import math

import numpy as np

from pipeline.messages import ScoredGroup

ONLY_TOKENS = (
    "the functions judged tokens, and none gave a number for a completion: add one that does, if only 0.0 for all"
)


def rewards_of(group: ScoredGroup) -> tuple[float | None, ...]:
    """Reward of every completion; None where no function applied or the value is not finite."""
    return tuple(
        score.reward if score.reward is not None and math.isfinite(score.reward) else None for score in group.scores
    )


def is_unscored(group: ScoredGroup) -> bool:
    """Whether no completion has a reward."""
    return all(reward is None for reward in rewards_of(group))


def is_taught(group: ScoredGroup) -> bool:
    """Whether a teacher has said something of a completion."""
    return any(score.teacher_logprobs is not None for score in group.scores)


def reward_problem(group: ScoredGroup) -> str:
    """What went wrong in a reward function, of the first completion of which there is something to say; else empty."""
    problems = (f"{part.name}: {part.problem}" for score in group.scores for part in score.parts if part.problem)
    if problem := next(problems, ""):
        return problem
    only_tokens = is_unscored(group) and any(score.token_rewards is not None for score in group.scores)
    return ONLY_TOKENS if only_tokens else ""


def is_zero_variance(group: ScoredGroup) -> bool:
    """Whether all rewards that there are are equal, so that every group-relative advantage is 0."""
    scored = [reward for reward in rewards_of(group) if reward is not None]
    return bool(scored) and max(scored) == min(scored)


def group_reward(group: ScoredGroup) -> float | None:
    """Mean of the rewards that there are; None without any."""
    scored = [reward for reward in rewards_of(group) if reward is not None]
    return math.fsum(scored) / len(scored) if scored else None


def is_out_of_range(group: ScoredGroup, lowest: float, highest: float) -> bool:
    """Whether the mean reward is below the one or above the other."""
    reward = group_reward(group)
    return reward is not None and not lowest <= reward <= highest


def is_nonfinite(group: ScoredGroup) -> bool:
    """Whether no token that the policy wrote has a finite generator logprob."""
    return not any(
        bool(np.any(np.isfinite(completion.generator_logprobs) & (completion.loss_mask != 0)))
        for completion in group.rollout.completions
    )
