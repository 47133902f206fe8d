"""Entries of all tables together, drawn at random: whatever is not refused learns the same however it is split."""

from __future__ import annotations

import random

import pytest
import torch

from pipeline.algorithms import ADVANTAGES, AGGREGATIONS, CORRECTIONS, DIVERGENCES, LOSSES, PROXIMALS, resolve_algorithm
from pipeline.config import AlgorithmSettings, StalenessSettings
from pipeline.errors import ConfigError
from tests.learning.builders import gradients, make_learner, tiny_llama
from tests.learning.papers import VERSION, groups_of


def drawn(seed: int) -> AlgorithmSettings:
    """One of the combinations that are valid."""
    choose = random.Random(seed)
    while True:
        settings = AlgorithmSettings.model_validate(
            {
                "advantage": choose.choice(sorted(ADVANTAGES)),
                "loss": choose.choice(sorted(LOSSES)),
                "correction": choose.choice(sorted(CORRECTIONS)),
                "aggregation": choose.choice(sorted(AGGREGATIONS)),
                "proximal": choose.choice(sorted(PROXIMALS)),
                "kl_coef": choose.choice([0.0, 0.2]),
                "kl_estimator": choose.choice(sorted(DIVERGENCES)),
                "kl_in": choose.choice(["loss", "reward"]),
                "kl_importance": choose.choice([False, True]),
                "dual_clip": choose.choice([0.0, 3.0]),
            }
        )
        try:
            resolve_algorithm(settings)
        except ConfigError:
            continue
        return settings


@pytest.mark.parametrize("seed", range(40))
def test_any_combination_learns_the_same_for_any_split(seed: int) -> None:
    settings = drawn(seed)
    model = tiny_llama()
    groups = groups_of(model)
    results = []
    for budget, order in ((30, 1), (10**6, -1)):
        model.zero_grad()
        learner = make_learner(
            model,
            algorithm=settings,
            trainer={"micro_batch_tokens": budget},
            staleness=StalenessSettings(max_staleness=8),
            reference=tiny_llama(2) if settings.kl_coef else None,
        )
        loss, metrics = learner.accumulate(groups[::order], trainer_version=VERSION)
        results.append((loss.item(), gradients(model), metrics))

    (loss, gradient, metrics), (other_loss, other_gradient, other_metrics) = results
    assert loss == pytest.approx(other_loss, rel=1e-9, abs=1e-12)
    assert metrics == pytest.approx(other_metrics, rel=1e-8, abs=1e-11)
    for name, value in gradient.items():
        assert torch.isfinite(value).all()
        torch.testing.assert_close(value, other_gradient[name], rtol=1e-7, atol=1e-11)
