"""Which groups teach nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from pipeline.filters import (
    group_reward,
    is_nonfinite,
    is_out_of_range,
    is_unscored,
    is_zero_variance,
    reward_problem,
    rewards_of,
)
from pipeline.messages import ScoredGroup
from tests.learning.builders import Row, make_group

NAN = float("nan")


def scored(*rewards: float | None) -> ScoredGroup:
    return make_group([Row(token_ids=[4], reward=reward) for reward in rewards])


@pytest.mark.parametrize(
    ("rewards", "zero_variance", "unscored"),
    [
        ((0.0, 1.0), False, False),
        ((0.1, 0.1, 0.1), True, False),
        ((0.5, None), True, False),
        ((0.5, None, 0.4), False, False),
        ((None, None), False, True),
        ((NAN, None), False, True),
    ],
)
def test_equal_rewards_and_missing_rewards_are_told_apart(
    rewards: tuple[float | None, ...], zero_variance: bool, unscored: bool
) -> None:
    group = scored(*rewards)

    assert is_zero_variance(group) == zero_variance
    assert is_unscored(group) == unscored


@pytest.mark.parametrize(
    ("rewards", "mean", "is_out"),
    [
        ((0.0, 1.0), 0.5, False),
        ((0.0, 0.5), 0.25, False),
        ((1.0, 0.5), 0.75, False),
        ((0.0, 0.4), 0.2, True),
        ((1.0, 1.0), 1.0, True),
        ((NAN, 0.1), 0.1, True),
        ((None, NAN), None, False),
    ],
)
def test_groups_are_held_against_the_mean_of_the_rewards_that_they_have(
    rewards: tuple[float | None, ...], mean: float | None, is_out: bool
) -> None:
    group = scored(*rewards)
    assert group_reward(group) == mean
    assert is_out_of_range(group, 0.25, 0.75) == is_out
    assert not is_out_of_range(group, -math.inf, math.inf)


def test_reward_that_is_not_finite_counts_as_none() -> None:
    assert rewards_of(scored(1.0, float("inf"), NAN, None)) == (1.0, None, None, None)


def test_group_is_nonfinite_only_when_no_written_token_has_a_finite_logprob() -> None:
    bad = Row(token_ids=[4, 4], generator_logprobs=[NAN, float("-inf")])
    outside = Row(token_ids=[4, 4], generator_logprobs=[NAN, -1.0], loss_mask=[1, 0])
    good = Row(token_ids=[4, 4], generator_logprobs=[NAN, -1.0])

    assert is_nonfinite(make_group([bad, outside]))
    assert not is_nonfinite(make_group([bad, good]))


def test_a_group_of_which_only_tokens_were_judged_says_so() -> None:
    group = scored(None, None)
    judged = replace(group.scores[0], token_rewards=np.array([0.5], dtype=np.float32))
    assert "judged tokens" in reward_problem(replace(group, scores=(judged, group.scores[1])))
    assert reward_problem(group) == ""
