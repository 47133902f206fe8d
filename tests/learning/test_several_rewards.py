"""Several reward functions for one completion: by their sum, and each normalised apart (GDPO)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipeline.config import AlgorithmSettings, RewardSettings
from pipeline.learner.plan import reward_weights
from pipeline.messages import Outcome, RewardResult, Score, ScoredGroup
from pipeline.rewards.combining import combine
from tests.learning.builders import Row, make_group, make_learner, plain_logprobs, tiny_llama

IDS = ([4, 7], [6, 2, 3], [5], [8, 1])
VALUES = {"right": [1.0, 0.0, 0.0, None], "brief": [-20.0, -30.0, -10.0, -20.0]}
WEIGHTS = {"right": 2.0, "brief": 0.5}


def scored() -> ScoredGroup:
    """Four completions of a policy that is the trainer's, judged by two functions; one does not apply to the last."""
    model = tiny_llama()
    rows = [Row(token_ids=ids, generator_logprobs=plain_logprobs(model, [1, 5, 3], ids).tolist()) for ids in IDS]
    return replace(make_group(rows), scores=tuple(score(row) for row in range(len(IDS))))


def score(row: int) -> Score:
    parts = [
        RewardResult(name=name, value=values[row], outcome=Outcome.NONE if values[row] is None else Outcome.OK)
        for name, values in VALUES.items()
    ]
    return combine(parts, list(WEIGHTS.values()), "unscored")


def loss_of(advantage: str) -> float:
    settings = AlgorithmSettings(advantage=advantage)
    learner = make_learner(tiny_llama(), algorithm=settings, reward_weights=WEIGHTS)
    return learner.accumulate([scored()], trainer_version=0)[0].item()


def of_tokens(advantages: np.ndarray) -> float:
    lengths = np.array([len(ids) for ids in IDS])
    return float(-(advantages * lengths).sum() / lengths.sum())


def standard(values: np.ndarray) -> np.ndarray:
    return (values - values.mean()) / (values.std() + 1e-6)


def test_each_reward_is_normalised_apart_and_weighs_as_the_settings_say() -> None:
    right, brief = np.zeros(4), standard(np.array(VALUES["brief"]))
    right[:3] = standard(np.array(VALUES["right"][:3]))
    summed = 2.0 * right + 0.5 * brief
    assert loss_of("gdpo") == pytest.approx(of_tokens(summed / (np.sqrt((summed**2).mean()) + 1e-6)), rel=1e-5)


def test_a_failure_that_counts_as_zero_is_one_to_every_function() -> None:
    """What another function has found good about the completion does not make up for it."""
    failed = RewardResult(name="right", value=None, outcome=Outcome.ERROR)
    brief = RewardResult(name="brief", value=-10.0, outcome=Outcome.OK)
    group = scored()
    zeroed = combine([failed, brief], list(WEIGHTS.values()), "zero")
    group = replace(group, scores=(*group.scores[:2], zeroed, group.scores[3]))
    learner = make_learner(tiny_llama(), algorithm=AlgorithmSettings(advantage="gdpo"), reward_weights=WEIGHTS)

    loss = learner.accumulate([group], trainer_version=0)[0].item()

    right = np.zeros(4)
    right[:3] = standard(np.array([1.0, 0.0, 0.0]))
    summed = 2.0 * right + 0.5 * standard(np.array([-20.0, -30.0, 0.0, -20.0]))
    assert loss == pytest.approx(of_tokens(summed / (np.sqrt((summed**2).mean()) + 1e-6)), rel=1e-5)


def test_all_others_see_the_weighted_sum() -> None:
    rewards = np.array([2.0 - 10.0, -15.0, -5.0, -10.0])
    assert loss_of("group_mean_std") == pytest.approx(of_tokens(standard(rewards)), rel=1e-5)


def test_weights_are_known_by_the_names_that_scores_have() -> None:
    rewards = [RewardSettings(function="exact_match", weight=2.0), RewardSettings(function="length", name="brief")]
    assert reward_weights(rewards) == {"exact_match": 2.0, "brief": 1.0}
    assert reward_weights([]) == {}
