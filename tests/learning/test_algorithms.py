"""The four tables against formulas written here from the papers, in float64."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pipeline.algorithms import (
    ADVANTAGES,
    AGGREGATIONS,
    CORRECTIONS,
    LOSSES,
    PRESETS,
    RewardBatch,
    TokenInputs,
    evaluate,
    resolve_algorithm,
)
from pipeline.algorithms.carriers import LossInputs
from pipeline.algorithms.ratios import k3
from pipeline.config import AlgorithmSettings
from pipeline.errors import ConfigError

DEFAULTS = AlgorithmSettings()


def reward_batch(groups: list[list[float | None]]) -> RewardBatch:
    flat = [reward for group in groups for reward in group]
    return RewardBatch(
        rewards=torch.tensor([reward or 0.0 for reward in flat], dtype=torch.float64),
        is_scored=torch.tensor([reward is not None for reward in flat], dtype=torch.bool),
        group_index=torch.tensor([index for index, group in enumerate(groups) for _ in group], dtype=torch.int64),
        num_tokens=torch.ones(len(flat), dtype=torch.int64),
    )


def advantages(name: str, groups: list[list[float | None]]) -> npt.NDArray[np.float64]:
    result: npt.NDArray[np.float64] = ADVANTAGES[name](reward_batch(groups), DEFAULTS).numpy()
    return result


def test_grpo_advantage_is_the_standard_score_inside_the_group() -> None:
    first, second = [0.0, 1.0, 1.0, 5.0], [2.0, 3.0]

    expected = np.concatenate([(np.array(g) - np.mean(g)) / (np.std(g) + 1e-6) for g in (first, second)])

    np.testing.assert_allclose(advantages("group_mean_std", [list(first), list(second)]), expected, rtol=1e-12)


def test_missing_reward_stays_out_of_the_baseline_and_gets_advantage_zero() -> None:
    np.testing.assert_allclose(advantages("group_mean", [[1.0, None, 4.0]]), [-1.5, 0.0, 1.5])
    np.testing.assert_allclose(advantages("group_mean_std", [[1.0, None, 4.0]]), [-1.5 / 1.500001, 0.0, 1.5 / 1.500001])


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@pytest.mark.parametrize("group", [[0.7], [0.1, 0.1, 0.1], [None, 3.0], [None, None]])
def test_group_without_a_difference_has_advantage_exactly_zero(name: str, group: list[float | None]) -> None:
    assert not advantages(name, [group, [0.0, 1.0]])[: len(group)].any()


def test_no_groups_have_no_advantages() -> None:
    assert advantages("group_mean_std", []).shape == (0,)


def test_ppo_clip_takes_the_lower_of_the_two_surrogates() -> None:
    ratios, signs = np.array([0.5, 0.9, 1.2, 1.5, 0.5, 0.9, 1.2, 1.5]), np.repeat([2.0, -2.0], 4)
    old = np.full(8, -1.3)
    trainer = torch.tensor(old + np.log(ratios), requires_grad=True)
    settings = AlgorithmSettings(clip_low=0.2, clip_high=0.28)

    result = LOSSES["ppo_clip"](
        LossInputs(
            trainer_logprobs=trainer,
            old_logprobs=torch.tensor(old),
            advantages=torch.tensor(signs),
            mask=torch.ones(8, dtype=torch.bool),
        ),
        settings,
    )
    result.losses.sum().backward()

    expected = [-1.0, -1.8, -2.4, -2.56, 1.6, 1.8, 2.4, 3.0]
    np.testing.assert_allclose(result.losses.detach().numpy(), expected, rtol=1e-12)
    is_free = [1, 1, 1, 0, 0, 1, 1, 1]
    np.testing.assert_allclose(trainer.grad.numpy(), -ratios * signs * is_free, rtol=1e-12)
    np.testing.assert_array_equal(result.stats["clip_fraction"].numpy(), 1 - np.array(is_free))


def test_truncated_importance_sampling_weighs_each_token_up_to_the_cap() -> None:
    trainer = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64)
    generator = torch.tensor([-1.0, -0.5, -4.0], dtype=torch.float64)

    correction = CORRECTIONS["tis"](trainer, generator, AlgorithmSettings(truncation=2.0))

    np.testing.assert_allclose(correction.weights.numpy(), [1.0, math.exp(-0.5), 2.0], rtol=1e-12)
    np.testing.assert_array_equal(correction.old_logprobs.numpy(), trainer.numpy())
    np.testing.assert_array_equal(correction.stats["truncated_fraction"].numpy(), [0, 0, 1])


def test_without_correction_the_generator_is_the_old_policy() -> None:
    trainer, generator = torch.tensor([-1.0, -2.0]), torch.tensor([-0.5, -3.0])

    correction = CORRECTIONS["none"](trainer, generator, DEFAULTS)

    np.testing.assert_array_equal(correction.old_logprobs.numpy(), generator.numpy())
    np.testing.assert_array_equal(correction.weights.numpy(), [1.0, 1.0])


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
@pytest.mark.parametrize("generator", [-91.0, 89.0, -math.inf, math.inf, math.nan])
def test_ratio_that_cannot_be_is_masked_and_leaves_loss_and_gradient_finite(name: str, generator: float) -> None:
    trainer = torch.tensor([[-1.0, -1.0]], dtype=torch.float64, requires_grad=True)

    result = evaluate(
        resolve_algorithm(AlgorithmSettings(correction=name)),
        TokenInputs(
            trainer_logprobs=trainer,
            generator_logprobs=torch.tensor([[-1.1, generator]], dtype=torch.float64),
            advantages=torch.tensor([[-3.0, -3.0]], dtype=torch.float64),
            mask=torch.ones(1, 2, dtype=torch.bool),
        ),
        AlgorithmSettings(correction=name),
    )
    result.losses.sum().backward()

    np.testing.assert_array_equal(result.mask.numpy(), [[True, False]])
    np.testing.assert_allclose(result.losses.detach().numpy(), [[3 * math.exp(0.1), 0.0]])
    np.testing.assert_allclose(trainer.grad.numpy(), [[3 * math.exp(0.1), 0.0]])
    assert all(torch.isfinite(value).all() for value in result.stats.values())


@pytest.mark.parametrize("which", ["trainer", "reference"])
@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_trainer_or_reference_logprob_that_is_not_finite_is_masked(which: str, value: float) -> None:
    trainer = torch.tensor([[-1.0, value if which == "trainer" else -1.0]], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([[-1.2, value if which == "reference" else -1.0]], dtype=torch.float64)

    result = evaluate(
        resolve_algorithm(DEFAULTS),
        TokenInputs(
            trainer_logprobs=trainer,
            generator_logprobs=torch.full((1, 2), -1.0, dtype=torch.float64),
            advantages=torch.ones(1, 2, dtype=torch.float64),
            mask=torch.ones(1, 2, dtype=torch.bool),
            ref_logprobs=reference,
        ),
        AlgorithmSettings(kl_coef=0.5),
    )
    result.losses.sum().backward()

    np.testing.assert_array_equal(result.mask.numpy(), [[True, False]])
    assert torch.isfinite(result.losses).all()
    assert trainer.grad[0, 1] == 0
    assert torch.isfinite(trainer.grad).all()


def test_k3_estimates_the_divergence_without_bias() -> None:
    sampled, other = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    divergence = float(np.sum(sampled * np.log(sampled / other)))

    estimates = k3(torch.tensor(np.log(other / sampled))).numpy()

    assert (estimates >= 0).all()
    assert float(np.sum(sampled * estimates)) == pytest.approx(divergence, rel=1e-12)


def test_reference_term_has_the_gradient_of_k3() -> None:
    trainer = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)

    result = evaluate(
        resolve_algorithm(DEFAULTS),
        TokenInputs(
            trainer_logprobs=trainer,
            generator_logprobs=torch.tensor([[-1.0]], dtype=torch.float64),
            advantages=torch.zeros(1, 1, dtype=torch.float64),
            mask=torch.ones(1, 1, dtype=torch.bool),
            ref_logprobs=torch.tensor([[-1.7]], dtype=torch.float64),
        ),
        AlgorithmSettings(kl_coef=0.5),
    )
    result.losses.sum().backward()

    assert result.losses.item() == pytest.approx(0.5 * (math.exp(-0.7) + 0.7 - 1))
    assert float(trainer.grad) == pytest.approx(0.5 * (1 - math.exp(-0.7)))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_mean", [1 / 6, 1 / 6, 0.0]),
        ("sequence_mean", [1 / 4, 1 / 8, 0.0]),
        ("sequence_sum", [1 / 2, 1 / 2, 0.0]),
    ],
)
def test_aggregation_weighs_tokens_as_its_formula_says(name: str, expected: list[float]) -> None:
    factors = AGGREGATIONS[name](torch.tensor([2, 4, 0]), DEFAULTS)

    np.testing.assert_allclose(factors.numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("name", sorted(AGGREGATIONS))
def test_aggregation_of_nothing_is_zero(name: str) -> None:
    assert not AGGREGATIONS[name](torch.tensor([0, 0]), DEFAULTS).any()


def test_off_policy_gradient_is_unbiased_where_no_weight_is_truncated() -> None:
    """A bandit with three arms: samples from q, corrected, give the gradient of E_p[A]."""
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    arm_advantages = torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64)
    generator = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    exact = torch.autograd.grad(-(logits.softmax(0) * arm_advantages).sum(), logits)[0]
    arms = torch.multinomial(generator, 200_000, replacement=True, generator=torch.Generator().manual_seed(0))

    result = evaluate(
        resolve_algorithm(DEFAULTS),
        TokenInputs(
            trainer_logprobs=logits.log_softmax(0)[arms][:, None],
            generator_logprobs=generator.log()[arms][:, None],
            advantages=arm_advantages[arms][:, None],
            mask=torch.ones(len(arms), 1, dtype=torch.bool),
        ),
        DEFAULTS,
    )
    estimate = torch.autograd.grad(result.losses.mean(), logits)[0]

    assert float(result.stats["truncated_fraction"].sum()) == 0
    np.testing.assert_allclose(estimate.numpy(), exact.numpy(), atol=4e-3)
    uncorrected = torch.autograd.grad(-(logits.log_softmax(0)[arms] * arm_advantages[arms]).mean(), logits)[0]
    assert float((uncorrected - exact).abs().max()) > 0.03


def test_off_policy_gradient_is_exact_in_expectation() -> None:
    """The same without sampling noise: every arm once, weighed by the generator's probability."""
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    arm_advantages = torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64)
    generator = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    exact = torch.autograd.grad(-(logits.softmax(0) * arm_advantages).sum(), logits)[0]

    result = evaluate(
        resolve_algorithm(DEFAULTS),
        TokenInputs(
            trainer_logprobs=logits.log_softmax(0)[:, None],
            generator_logprobs=generator.log()[:, None],
            advantages=arm_advantages[:, None],
            mask=torch.ones(3, 1, dtype=torch.bool),
        ),
        DEFAULTS,
    )
    expected = torch.autograd.grad((generator * result.losses[:, 0]).sum(), logits)[0]

    np.testing.assert_allclose(expected.numpy(), exact.numpy(), rtol=1e-12)


def test_every_preset_resolves_and_a_setting_replaces_its_choice() -> None:
    for name in PRESETS:
        resolve_algorithm(AlgorithmSettings(preset=name))

    algorithm = resolve_algorithm(AlgorithmSettings(correction="none", aggregation="sequence_mean"))

    assert algorithm.correction is CORRECTIONS["none"]
    assert algorithm.aggregation is AGGREGATIONS["sequence_mean"]
    assert algorithm.advantage is ADVANTAGES["group_mean_std"]


def test_unknown_name_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.loss = 'ppo_clp' is not known; did you mean 'ppo_clip'"):
        resolve_algorithm(AlgorithmSettings(loss="ppo_clp"))
    with pytest.raises(ConfigError, match=r"algorithm\.preset = 'xyz' is not known\. There are: grpo"):
        resolve_algorithm(AlgorithmSettings(preset="xyz"))


@pytest.mark.parametrize(
    ("setting", "table"),
    [
        ("preset", PRESETS),
        ("advantage", ADVANTAGES),
        ("loss", LOSSES),
        ("correction", CORRECTIONS),
        ("aggregation", AGGREGATIONS),
    ],
)
def test_the_description_of_a_setting_lists_the_names_in_its_table(setting: str, table: dict[str, object]) -> None:
    description = AlgorithmSettings.model_fields[setting].description or ""
    assert set(description.rpartition(": ")[2].removesuffix(".").split(", ")) == set(table)
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page or f'"{name}"' in page for name in table)
