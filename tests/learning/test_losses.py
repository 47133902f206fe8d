"""Policy losses against formulas written here from the papers: value and gradient, one completion at a time.

Gradients are written by hand, not taken from torch, and held against finite differences as well.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pipeline.algorithms import LOSSES
from pipeline.config import AlgorithmSettings
from tests.learning.batches import doubles, loss_inputs

Array = npt.NDArray[np.float64]

RATIOS = np.array([0.3, 0.5, 0.9, 1.0, 1.2, 1.5, 4.0, 9.0])
LENGTHS = [5, 3, 1]


def settings(**changes: object) -> AlgorithmSettings:
    return AlgorithmSettings.model_validate(changes).resolved


def run(name: str, new: Array, old: Array, advantages: Array, **changes: object) -> tuple[Array, Array, Array]:
    """Loss of each token, gradient of their sum to each logprob, and which were clipped; rows are completions."""
    trainer = doubles(new.ravel()).view(new.shape).requires_grad_()
    inputs = loss_inputs(trainer, torch.tensor(old), torch.tensor(advantages))
    result = LOSSES[name](inputs, settings(**changes))
    result.losses.sum().backward()
    clipped = result.stats.get("clip_fraction", torch.zeros_like(trainer))
    assert trainer.grad is not None
    return result.losses.detach().numpy(), trainer.grad.numpy(), clipped.detach().numpy()


def by_ratio(name: str, ratios: Array, advantages: Array, **changes: object) -> tuple[Array, Array, Array]:
    old = np.linspace(-1.5, -2.5, ratios.size).reshape(ratios.shape)
    return run(name, old + np.log(ratios), old, advantages, **changes)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_ppo_clip_takes_the_lower_of_the_two_surrogates(advantage: float) -> None:
    losses, gradient, clipped = by_ratio("ppo_clip", RATIOS[None], np.full((1, 8), advantage))

    bounds = [min(max(ratio, 0.8), 1.28) for ratio in RATIOS]
    expected = [-min(ratio * advantage, bound * advantage) for ratio, bound in zip(RATIOS, bounds, strict=True)]
    is_free = np.array([ratio * advantage <= bound * advantage for ratio, bound in zip(RATIOS, bounds, strict=True)])
    np.testing.assert_allclose(losses[0], expected, rtol=1e-12)
    np.testing.assert_allclose(gradient[0], -RATIOS * advantage * is_free, rtol=1e-12)
    np.testing.assert_array_equal(clipped[0], ~is_free)


def test_dual_clip_bounds_the_loss_of_a_negative_advantage() -> None:
    losses, gradient, clipped = by_ratio("ppo_clip", RATIOS[None], np.full((1, 8), -2.0), dual_clip=3.0)

    plain = np.maximum(RATIOS, 0.8) * 2
    np.testing.assert_allclose(losses[0], np.minimum(plain, 6.0), rtol=1e-12)
    np.testing.assert_allclose(gradient[0], [0, 0, 1.8, 2.0, 2.4, 3.0, 0, 0], rtol=1e-12)
    np.testing.assert_array_equal(clipped[0], [1, 1, 0, 0, 0, 0, 1, 1])


def test_dual_clip_leaves_positive_advantages_alone() -> None:
    plain = by_ratio("ppo_clip", RATIOS[None], np.full((1, 8), 2.0))
    dual = by_ratio("ppo_clip", RATIOS[None], np.full((1, 8), 2.0), dual_clip=3.0)
    np.testing.assert_array_equal(dual[1], plain[1])


def ragged() -> tuple[Array, Array, npt.NDArray[np.bool_]]:
    """Log-ratios and old logprobs of three completions of unlike length, [3, 5], and where they are."""
    random = np.random.default_rng(0)
    mask = np.arange(5) < np.array(LENGTHS)[:, None]
    return random.normal(0, 0.3, (3, 5)), random.uniform(-3, -1, (3, 5)), mask


def run_ragged(name: str, advantages: Array, **changes: object) -> tuple[Array, Array]:
    """With garbage outside the mask, which must not matter. Returns losses and gradients within the mask."""
    log_ratios, old, mask = ragged()
    trainer = torch.tensor(np.where(mask, old + log_ratios, -7.0), requires_grad=True)
    inputs = loss_inputs(trainer, torch.tensor(old), torch.tensor(advantages), torch.tensor(mask))
    result = LOSSES[name](inputs, settings(**changes))
    torch.where(inputs.mask, result.losses, 0.0).sum().backward()
    assert trainer.grad is not None
    assert not trainer.grad[~inputs.mask].any()
    return result.losses.detach().numpy(), trainer.grad.numpy()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_gspo_clips_the_geometric_mean_of_a_whole_completion(sign: float) -> None:
    advantages = sign * np.array([[2.0], [0.5], [1.0]]) * np.ones((3, 5))
    losses, gradient = run_ragged("gspo", advantages, gspo_clip_low=0.1, gspo_clip_high=0.05)

    log_ratios, _, _ = ragged()
    for row, length in enumerate(LENGTHS):
        s, a = np.exp(log_ratios[row, :length].mean()), advantages[row, 0]
        clipped = min(max(s, 0.9), 1.05)
        value = -min(s * a, clipped * a)
        slope = -s * a if s * a <= clipped * a else 0.0
        np.testing.assert_allclose(losses[row, :length], value, rtol=1e-12)
        np.testing.assert_allclose(gradient[row, :length], slope, rtol=1e-12)


def test_gspo_gradient_is_that_of_the_clipped_sequence_objective() -> None:
    """Mean over tokens of the token form against finite differences of -min(s A, clip(s) A), written here."""
    log_ratios, old, mask = ragged()
    advantages = np.array([[2.0], [-0.5], [1.0]])
    _, gradient = run_ragged("gspo", advantages * np.ones((3, 5)), gspo_clip_low=0.5, gspo_clip_high=0.5)

    def objective(new: Array) -> float:
        total = 0.0
        for row, length in enumerate(LENGTHS):
            s, a = float(np.exp((new - old)[row, :length].mean())), float(advantages[row, 0])
            total -= min(s * a, min(max(s, 0.5), 1.5) * a)
        return total

    numeric = finite_differences(objective, old + log_ratios)
    np.testing.assert_allclose(gradient / mask.sum(1, keepdims=True), np.where(mask, numeric, 0), atol=1e-7)


def test_gmpo_is_the_geometric_mean_of_clipped_ratios() -> None:
    log_ratios, old, mask = ragged()
    advantages = np.array([[2.0], [-0.5], [1.0]])
    losses, gradient = run_ragged("gmpo", advantages * np.ones((3, 5)), gmpo_clip=0.2)

    def sequence_loss(new: Array, row: int) -> float:
        a, product = float(advantages[row, 0]), 1.0
        for x in (new - old)[row, : LENGTHS[row]]:
            product *= min(np.exp(x), np.exp(0.2)) if a > 0 else max(np.exp(x), np.exp(-0.2))
        return -a * float(product ** (1 / LENGTHS[row]))

    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(losses[row, :length], sequence_loss(old + log_ratios, row), rtol=1e-12)
    numeric = finite_differences(lambda new: sum(sequence_loss(new, row) for row in range(3)), old + log_ratios)
    np.testing.assert_allclose(gradient / mask.sum(1, keepdims=True), np.where(mask, numeric, 0), atol=1e-7)


def test_topr_learns_what_was_right_whole_and_tapers_what_was_wrong() -> None:
    log_ratios, old, _ = ragged()
    advantages = np.array([[2.0], [-0.5], [-1.0]]) * np.ones((3, 5))
    losses, gradient = run_ragged("topr", advantages)

    for row, length in enumerate(LENGTHS):
        ratio = np.exp(log_ratios[row, :length].sum())
        weight = 1.0 if advantages[row, 0] >= 0 else min(ratio, 1.0)
        new = (old + log_ratios)[row, :length]
        np.testing.assert_allclose(losses[row, :length], -weight * advantages[row, 0] * new, rtol=1e-12)
        np.testing.assert_allclose(gradient[row, :length], -weight * advantages[row, 0], rtol=1e-12)
    assert np.exp(log_ratios[1, :3].sum()) != 1


def test_topr_forgets_a_mistake_that_has_become_impossible() -> None:
    new, old = np.full((1, 40), -18.0), np.full((1, 40), -0.1)
    _, gradient, _ = run("topr", new, old, np.full((1, 40), -1.0))
    assert np.abs(gradient).max() < 1e-100


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_cispo_caps_the_weight_and_keeps_every_gradient(advantage: float) -> None:
    losses, gradient, clipped = by_ratio("cispo", RATIOS[None], np.full((1, 8), advantage))

    weights = np.minimum(RATIOS, 5.0)
    new = np.linspace(-1.5, -2.5, 8) + np.log(RATIOS)
    np.testing.assert_allclose(losses[0], -weights * advantage * new, rtol=1e-12)
    np.testing.assert_allclose(gradient[0], -weights * advantage, rtol=1e-12)
    np.testing.assert_array_equal(clipped[0], RATIOS > 5.0)


@pytest.mark.parametrize(("advantage", "tau"), [(2.0, 1.5), (-2.0, 3.0)])
def test_sapo_closes_its_gate_softly(advantage: float, tau: float) -> None:
    changes = {"sapo_tau_positive": 1.5, "sapo_tau_negative": 3.0}
    losses, gradient, _ = by_ratio("sapo", RATIOS[None], np.full((1, 8), advantage), **changes)

    sigmoid = 1 / (1 + np.exp(-tau * (RATIOS - 1)))
    np.testing.assert_allclose(losses[0], -4 / tau * sigmoid * advantage, rtol=1e-12)
    slope = 4 * sigmoid * (1 - sigmoid) * RATIOS
    np.testing.assert_allclose(gradient[0], -slope * advantage, rtol=1e-11)


@pytest.mark.parametrize("divergence", ["tv", "kl"])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_dppo_masks_by_divergence_what_leads_further_away(divergence: str, advantage: float) -> None:
    old_p = np.array([0.5, 0.5, 0.5, 0.01, 0.01, 0.9, 0.9, 0.99])
    new_p = np.array([0.5, 0.7, 0.3, 0.05, 0.002, 0.99, 0.6, 0.7])
    limit = 0.15 if divergence == "tv" else 0.05
    changes = {"dppo_divergence": divergence, "dppo_max": limit}
    arguments = (np.log(new_p)[None], np.log(old_p)[None], np.full((1, 8), advantage))
    losses, gradient, clipped = run("dppo", *arguments, **changes)

    distance = np.abs(new_p - old_p)
    if divergence == "kl":
        distance = old_p * np.log(old_p / new_p) + (1 - old_p) * np.log((1 - old_p) / (1 - new_p))
    is_masked = (advantage * (new_p - old_p) > 0) & (distance > limit)
    expected = np.where(is_masked, 0.0, -new_p / old_p * advantage)
    np.testing.assert_allclose(losses[0], expected, rtol=1e-12)
    np.testing.assert_allclose(gradient[0], expected, rtol=1e-12)
    np.testing.assert_array_equal(clipped[0], is_masked)
    assert 0 < is_masked.sum() < 8


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_of_certain_tokens_is_finite(divergence: str) -> None:
    new, old = np.array([[0.0, -20.0, -1e-9]]), np.array([[-1e-12, 0.0, 0.0]])
    losses, gradient, _ = run("dppo", new, old, np.array([[1.0, 1.0, -1.0]]), dppo_divergence=divergence)
    assert np.isfinite(losses).all()
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_at_equal_policies_the_gradient_is_the_plain_policy_gradient(name: str, sign: float) -> None:
    """-A for each logprob, whatever the length of the completion."""
    log_ratios, old, mask = ragged()
    trainer = torch.tensor(old, requires_grad=True)
    advantages = sign * np.array([[2.0], [0.5], [1.0]]) * np.ones((3, 5))
    inputs = loss_inputs(trainer, torch.tensor(old), torch.tensor(advantages), torch.tensor(mask))

    result = LOSSES[name](inputs, settings())
    torch.where(inputs.mask, result.losses, 0.0).sum().backward()

    assert trainer.grad is not None
    np.testing.assert_allclose(trainer.grad.numpy(), np.where(mask, -advantages, 0.0), rtol=1e-12)
    if "clip_fraction" in result.stats:
        assert not result.stats["clip_fraction"].any()
    assert log_ratios.any()


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("gap", [-90.0, 90.0])
def test_loss_of_policies_that_are_worlds_apart_is_finite(name: str, gap: float) -> None:
    for advantage in (3.0, -3.0):
        losses, gradient, _ = run(
            name, np.full((2, 3), -100.0 + gap), np.full((2, 3), -100.0), np.full((2, 3), advantage)
        )
        assert np.isfinite(losses).all()
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("name", ["gspo", "gmpo", "topr"])
def test_completion_of_which_nothing_is_trained_has_a_finite_loss(name: str) -> None:
    trainer = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[False] * 3, [True] * 3])
    inputs = loss_inputs(trainer, torch.zeros(2, 3).double(), torch.ones(2, 3).double(), mask)
    result = LOSSES[name](inputs, settings())
    torch.where(mask, result.losses, 0.0).sum().backward()
    assert torch.isfinite(result.losses).all()
    assert trainer.grad is not None
    assert torch.isfinite(trainer.grad).all()


def finite_differences(function: Callable[[Array], float], at: Array, step: float = 1e-6) -> Array:
    gradient = np.zeros_like(at)
    for index in np.ndindex(at.shape):
        up, down = at.copy(), at.copy()
        up[index] += step
        down[index] -= step
        gradient[index] = (function(up) - function(down)) / (2 * step)
    return gradient
