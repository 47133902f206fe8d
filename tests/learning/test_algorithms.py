"""Aggregations, and algorithms by name."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.algorithms import (
    ADVANTAGES,
    AGGREGATIONS,
    CORRECTIONS,
    LOSSES,
    PRESETS,
    PROXIMALS,
    BatchShape,
    resolve_algorithm,
)
from pipeline.algorithms.divergences import DIVERGENCES
from pipeline.config import AlgorithmSettings
from pipeline.config.algorithm import WEIGHTING
from pipeline.errors import ConfigError
from tests.learning.objectives import algorithm, objective_of

DEFAULTS = AlgorithmSettings()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_mean", [1 / 6, 1 / 6, 0.0]),
        ("sequence_mean", [1 / 4, 1 / 8, 0.0]),
        ("sequence_sum", [1 / 2, 1 / 2, 0.0]),
        ("constant", [1 / 20, 1 / 20, 0.0]),
    ],
)
def test_aggregation_weighs_tokens_as_its_formula_says(name: str, expected: list[float]) -> None:
    factors = AGGREGATIONS[name](BatchShape(num_tokens=torch.tensor([2, 4, 0]), max_tokens=10), DEFAULTS)

    np.testing.assert_allclose(factors.numpy(), expected, rtol=1e-12)


def test_length_of_the_constant_aggregation_can_be_given() -> None:
    shape = BatchShape(num_tokens=torch.tensor([2, 4, 0]), max_tokens=10)
    factors = AGGREGATIONS["constant"](shape, AlgorithmSettings(aggregation_length=50))
    np.testing.assert_allclose(factors.numpy(), [1 / 100, 1 / 100, 0.0], rtol=1e-12)


@pytest.mark.parametrize("name", sorted(AGGREGATIONS))
def test_aggregation_of_nothing_is_zero(name: str) -> None:
    assert not AGGREGATIONS[name](BatchShape(num_tokens=torch.tensor([0, 0]), max_tokens=0), DEFAULTS).any()


def test_every_preset_resolves_and_a_setting_replaces_its_choice() -> None:
    for name in PRESETS:
        resolve_algorithm(AlgorithmSettings(preset=name))

    chosen = algorithm(correction="none", aggregation="sequence_mean")

    assert chosen.correction is CORRECTIONS["none"]
    assert chosen.aggregation is AGGREGATIONS["sequence_mean"]
    assert chosen.advantage is ADVANTAGES["group_mean_std"]
    assert chosen.proximal is PROXIMALS["generator"]
    assert algorithm().proximal is PROXIMALS["recomputed"]


@pytest.mark.parametrize("loss", sorted(LOSSES))
@pytest.mark.parametrize("correction", sorted(CORRECTIONS))
def test_any_loss_goes_with_any_correction_and_proximal_policy_or_is_refused(loss: str, correction: str) -> None:
    trainer = torch.tensor([[-1.0, -2.0], [-0.5, -0.1]], dtype=torch.float64)
    generator = torch.tensor([[-1.1, -1.9], [-0.6, -0.1]], dtype=torch.float64)
    refused = "generator" if correction in WEIGHTING else "interpolated"
    with pytest.raises(ConfigError, match=r"; set algorithm\."):
        algorithm(loss=loss, correction=correction, proximal=refused)
    for proximal in set(PROXIMALS) - {refused}:
        chosen = algorithm(loss=loss, correction=correction, proximal=proximal)
        leaf = trainer.clone().requires_grad_()
        ages = torch.tensor([[0, 1], [2, 2]])
        result = objective_of(chosen, leaf, generator, torch.tensor([[1.0], [-1.0]]).double().expand(2, 2), ages=ages)
        result.losses.sum().backward()
        assert torch.isfinite(leaf.grad).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"correction": "tis", "proximal": "generator"}, "counts the same ratio twice"),
        ({"correction": "none", "proximal": "interpolated"}, "uncorrected"),
        ({"kl_importance": True, "kl_in": "reward"}, "weighed with its completion already"),
        ({"band_low": 6.0}, "would mask every token"),
        ({"dual_clip": 1.0}, "would end the gradient"),
        ({"min_group_reward": 0.5, "max_group_reward": 0.4}, "every group would be dropped"),
    ],
)
def test_parts_that_cancel_each_other_are_refused_with_the_way_out(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        algorithm(**changes)
    assert "set " in str(raised.value)


def test_groups_are_held_against_the_bounds_that_are_set() -> None:
    assert AlgorithmSettings().group_reward_range == (-math.inf, math.inf)
    assert AlgorithmSettings(min_group_reward=0.0).group_reward_range == (0.0, math.inf)
    assert AlgorithmSettings(max_group_reward=-1.5).group_reward_range == (-math.inf, -1.5)


def test_unknown_name_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.loss = 'ppo_clp' is not known; did you mean 'ppo_clip'"):
        resolve_algorithm(AlgorithmSettings(loss="ppo_clp"))
    with pytest.raises(ConfigError, match=r"algorithm\.preset = 'xyz' is not known\. There are: .*grpo"):
        resolve_algorithm(AlgorithmSettings(preset="xyz"))


def test_a_preset_brings_its_way_to_sample_and_a_setting_overrules_it() -> None:
    assert AlgorithmSettings(preset="dapo").resolved.drop_zero_variance is True
    assert AlgorithmSettings(preset="dapo", drop_zero_variance=False).resolved.drop_zero_variance is False
    assert AlgorithmSettings().resolved.drop_zero_variance is False
    assert AlgorithmSettings(drop_zero_variance=True, overlong=True).resolved.overlong is True
    assert AlgorithmSettings(preset="rloo").resolved.kl_in == "reward"


@pytest.mark.parametrize(
    ("setting", "table"),
    [
        ("preset", PRESETS),
        ("advantage", ADVANTAGES),
        ("loss", LOSSES),
        ("correction", CORRECTIONS),
        ("aggregation", AGGREGATIONS),
        ("kl_estimator", DIVERGENCES),
    ],
)
def test_the_description_of_a_setting_lists_the_names_in_its_table(setting: str, table: dict[str, object]) -> None:
    description = AlgorithmSettings.model_fields[setting].description or ""
    assert set(description.rpartition(": ")[2].removesuffix(".").split(", ")) == set(table)
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page or f'"{name}"' in page for name in table)
