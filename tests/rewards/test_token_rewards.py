"""Reward functions that judge single tokens, or the steps that end at them."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.messages import Outcome, RewardResult
from pipeline.rewards.combining import combine
from tests.rewards.pools import reward, rollout, running_pool


async def test_a_list_for_a_completion_is_a_reward_for_each_of_its_tokens() -> None:
    async with running_pool(reward("judges_tokens", weight=2.0), reward("returns_what_is_asked", weight=3.0)) as pool:
        scores = await pool.score(rollout("a", "b", columns={"what": "none"}))
    for score, outcome in zip(scores, (3.0, None), strict=True):
        assert score.token_rewards is not None
        np.testing.assert_array_equal(score.token_rewards, np.array([np.nan, 2.0, np.nan, 6.0], dtype=np.float32))
        assert score.reward == outcome
        assert (score.parts[0].value, score.parts[0].outcome) == (None, Outcome.OK)


@pytest.mark.parametrize(
    ("what", "problem"),
    [
        ("short", "returned 3 values for the 4 tokens of a completion"),
        ("text", "returned str for a completion; expected a number or None"),
    ],
)
async def test_token_rewards_that_do_not_fit_are_an_error_for_that_completion(what: str, problem: str) -> None:
    async with running_pool(reward("judges_tokens")) as pool:
        (score, _) = await pool.score(rollout("a", "b", columns={"what": what}))
    assert score.token_rewards is None
    assert (score.reward, score.parts[0].outcome) == (None, Outcome.ERROR)
    assert problem in score.parts[0].problem


def test_token_rewards_of_several_functions_are_summed_where_a_step_ends() -> None:
    steps = [
        RewardResult(name="f", value=None, outcome=Outcome.OK, token_values=(1.0, None, None)),
        RewardResult(name="g", value=None, outcome=Outcome.OK, token_values=(3.0, None, 5.0)),
        RewardResult(name="h", value=1.0, outcome=Outcome.OK),
    ]

    score = combine(steps, [2.0, 0.5, 1.0], "unscored")

    assert score.token_rewards is not None
    np.testing.assert_array_equal(score.token_rewards, np.array([3.5, np.nan, 2.5], dtype=np.float32))
    assert score.reward == 1.0
