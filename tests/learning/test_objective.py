"""The loss of a micro-batch as a whole: weights, ratios, the KL term, and what may not reach it."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pipeline.algorithms import CORRECTIONS, LOSSES
from pipeline.algorithms.divergences import DIVERGENCES
from tests.learning.objectives import algorithm, objective_of


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
@pytest.mark.parametrize("generator", [-91.0, 89.0, -math.inf, math.inf, math.nan])
def test_ratio_that_cannot_be_is_masked_and_leaves_loss_and_gradient_finite(name: str, generator: float) -> None:
    """L3."""
    trainer = torch.tensor([[-1.0, -1.0]], dtype=torch.float64, requires_grad=True)

    result = objective_of(
        algorithm(correction=name, geometric_band=2.0),
        trainer,
        torch.tensor([[-1.1, generator]], dtype=torch.float64),
        torch.tensor([[-3.0, -3.0]], dtype=torch.float64),
    )
    result.losses.sum().backward()

    np.testing.assert_array_equal(result.mask.numpy(), [[True, False]])
    np.testing.assert_allclose(result.losses.detach().numpy(), [[3 * math.exp(0.1), 0.0]])
    np.testing.assert_allclose(trainer.grad.numpy(), [[3 * math.exp(0.1), 0.0]])
    assert all(torch.isfinite(value).all() for value in result.stats.values())


@pytest.mark.parametrize("loss", sorted(LOSSES))
@pytest.mark.parametrize("which", ["trainer", "reference"])
@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_trainer_or_reference_logprob_that_is_not_finite_is_masked(loss: str, which: str, value: float) -> None:
    trainer = torch.tensor([[-1.0, value if which == "trainer" else -1.0]], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([[-1.2, value if which == "reference" else -1.0]], dtype=torch.float64)

    result = objective_of(
        algorithm(kl_coef=0.5, loss=loss, correction="none"),
        trainer,
        torch.full((1, 2), -1.0, dtype=torch.float64),
        torch.ones(1, 2, dtype=torch.float64),
        reference=reference,
    )
    result.losses.sum().backward()

    np.testing.assert_array_equal(result.mask.numpy(), [[True, False]])
    assert torch.isfinite(result.losses).all()
    assert trainer.grad[0, 1] == 0
    assert torch.isfinite(trainer.grad).all()


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_weight_of_a_token_is_its_own_whatever_the_loss(loss: str) -> None:
    """Also where a loss looks at the whole completion: what a correction masks teaches nothing."""
    trainer = torch.tensor([[-1.0, -1.0, -1.0]], dtype=torch.float64, requires_grad=True)

    result = objective_of(
        algorithm(loss=loss, correction="icepop", proximal="recomputed"),
        trainer,
        torch.tensor([[-1.1, -4.0, -0.9]], dtype=torch.float64),
        torch.full((1, 3), 2.0, dtype=torch.float64),
    )
    result.losses.sum().backward()

    np.testing.assert_allclose(trainer.grad.numpy(), [[-2 * math.exp(0.1), 0.0, -2 * math.exp(-0.1)]], rtol=1e-12)


def test_ratio_of_the_loss_and_weight_of_the_correction_share_what_lies_between_the_policies() -> None:
    """Decoupled PPO: w = min(prox / mu, cap) and the clip is around pi / prox, each token by its age."""
    pi, mu, ages = np.array([-1.0, -1.0, -1.0, -1.0]), np.array([-1.1, -1.9, -1.9, -0.6]), np.array([0, 1, 3, 2])
    trainer = torch.tensor(pi[None], requires_grad=True)

    result = objective_of(
        algorithm(preset="decoupled_ppo", truncation=1.5),
        trainer,
        torch.tensor(mu[None]),
        torch.full((1, 4), 2.0).double(),
        ages=torch.tensor(ages[None]),
    )
    result.losses.sum().backward()

    prox = np.where(ages > 0, mu + (1 - 1 / np.maximum(ages, 1)) * (pi - mu), pi)
    weight, ratio = np.minimum(np.exp(prox - mu), 1.5), np.exp(pi - prox)
    np.testing.assert_allclose(result.losses[0].detach(), -weight * np.minimum(ratio, 1.28) * 2, rtol=1e-12)
    np.testing.assert_allclose(trainer.grad[0], -weight * ratio * 2 * (ratio <= 1.28), rtol=1e-12)
    assert result.stats["clip_fraction"].tolist() == [[0, 1, 1, 0]]
    assert result.stats["truncated_fraction"].tolist() == [[0, 0, 1, 0]]


SAMPLED, OTHER = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])


@pytest.mark.parametrize(("name", "is_exact"), [("k1", True), ("k2", False), ("k3", True)])
def test_estimate_of_the_divergence(name: str, is_exact: bool) -> None:
    divergence = float(np.sum(SAMPLED * np.log(SAMPLED / OTHER)))

    estimates = DIVERGENCES[name](torch.tensor(np.log(OTHER / SAMPLED))).numpy()

    assert (float(np.sum(SAMPLED * estimates)) == pytest.approx(divergence, rel=1e-12)) == is_exact
    assert (estimates >= 0).all() == (name != "k1")


@pytest.mark.parametrize(
    ("estimator", "slope"),
    [("k1", 1.0), ("k2", 0.7), ("k3", 1 - math.exp(-0.7))],
)
def test_reference_term_has_the_gradient_of_its_estimator(estimator: str, slope: float) -> None:
    trainer = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    values = {"k1": 0.7, "k2": 0.245, "k3": math.exp(-0.7) + 0.7 - 1}

    result = objective_of(
        algorithm(kl_coef=0.5, kl_estimator=estimator),
        trainer,
        torch.tensor([[-1.0]], dtype=torch.float64),
        torch.zeros(1, 1, dtype=torch.float64),
        reference=torch.tensor([[-1.7]], dtype=torch.float64),
    )
    result.losses.sum().backward()

    assert result.losses.item() == pytest.approx(0.5 * values[estimator])
    assert result.stats["kl"].item() == pytest.approx(values[estimator])
    assert float(trainer.grad) == pytest.approx(0.5 * slope)


def mean_kl_gradient(probabilities: npt.NDArray[np.float64], **changes: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Expected gradient of the KL term over tokens drawn from `probabilities`, and the divergence's own."""
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor(OTHER)
    exact = torch.autograd.grad((logits.softmax(0) * (logits.log_softmax(0) - reference.log())).sum(), logits)[0]
    drawn_from = logits.softmax(0).detach() if probabilities is SAMPLED else torch.tensor(probabilities)
    result = objective_of(
        algorithm(kl_coef=1.0, **changes),
        logits.log_softmax(0)[:, None],
        drawn_from.log()[:, None],
        torch.zeros(3, 1, dtype=torch.float64),
        reference=reference.log()[:, None],
    )
    return torch.autograd.grad((drawn_from * result.losses[:, 0]).sum(), logits)[0], exact


@pytest.mark.parametrize(
    ("estimator", "importance", "is_exact"),
    [
        ("k1", False, False),
        ("k2", False, True),
        ("k3", False, False),
        ("k1", True, True),
        ("k3", True, True),
    ],
)
def test_gradient_of_the_divergence_at_equal_policies(estimator: str, importance: bool, is_exact: bool) -> None:
    gradient, exact = mean_kl_gradient(SAMPLED, kl_estimator=estimator, kl_importance=importance)
    assert torch.allclose(gradient, exact, rtol=1e-9) == is_exact
    if estimator == "k1" and not importance:
        torch.testing.assert_close(gradient, torch.zeros(3).double(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_weighed_by_importance_the_gradient_of_the_divergence_is_exact_on_old_tokens(estimator: str) -> None:
    old = np.array([0.2, 0.5, 0.3])
    weighed, exact = mean_kl_gradient(old, kl_estimator=estimator, kl_importance=True)
    plain, _ = mean_kl_gradient(old, kl_estimator=estimator)
    torch.testing.assert_close(weighed, exact, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(plain, exact, rtol=0.05)


def test_reference_term_in_the_reward_is_reported_and_not_in_the_loss() -> None:
    result = objective_of(
        algorithm(kl_coef=0.5, kl_in="reward"),
        torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True),
        torch.tensor([[-1.0]], dtype=torch.float64),
        torch.zeros(1, 1, dtype=torch.float64),
        reference=torch.tensor([[-1.7]], dtype=torch.float64),
    )
    assert result.losses.item() == 0
    assert result.stats["kl"].item() > 0


UNBIASED = [
    {"correction": "tis", "truncation": 10.0},
    {"correction": "importance"},
    {"loss": "cispo", "correction": "none"},
]


@pytest.mark.parametrize("changes", UNBIASED, ids=["tis", "importance", "cispo"])
def test_off_policy_gradient_is_exact_in_expectation_where_no_weight_is_cut(changes: dict[str, object]) -> None:
    """A bandit with three arms, every arm once, weighed by the generator's probability: the gradient of E_pi[A]."""
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    arm_advantages = torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64)
    generator = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    exact = torch.autograd.grad(-(logits.softmax(0) * arm_advantages).sum(), logits)[0]

    result = objective_of(
        algorithm(**changes), logits.log_softmax(0)[:, None], generator.log()[:, None], arm_advantages[:, None]
    )
    expected = torch.autograd.grad((generator * result.losses[:, 0]).sum(), logits)[0]

    np.testing.assert_allclose(expected.numpy(), exact.numpy(), rtol=1e-12)
    uncorrected = torch.autograd.grad(-(generator * logits.log_softmax(0) * arm_advantages).sum(), logits)[0]
    assert float((uncorrected - exact).abs().max()) > 0.03


def test_weight_of_a_completion_makes_the_gradient_exact_where_tokens_apart_do_not() -> None:
    """Two tokens, the second after the first: sequence importance sampling is exact, token by token is not."""
    random = np.random.default_rng(0)
    logits = torch.tensor(random.normal(0, 1, (4, 3)), requires_grad=True)  # of token 1, then of token 2 after each
    generator = torch.tensor(random.normal(0, 1, (4, 3))).log_softmax(1)
    rewards = torch.tensor(random.normal(0, 1, (9, 1)))
    paths = [(first, second) for first in range(3) for second in range(3)]

    def logprobs(table: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.stack([table[0, i], table[1 + i, j]]) for i, j in paths])  # [9, 2]

    policy = logprobs(logits.log_softmax(1))
    exact = torch.autograd.grad(-(policy.sum(1).exp() * rewards[:, 0]).sum(), logits, retain_graph=True)[0]
    chances = logprobs(generator).sum(1).exp()
    gradients = {}
    for name in ("sequence_tis", "importance"):
        chosen = algorithm(correction=name, truncation=1e6)
        result = objective_of(chosen, policy, logprobs(generator), rewards.expand(9, 2))
        total = (chances[:, None] * result.losses).sum()
        gradients[name] = torch.autograd.grad(total, logits, retain_graph=True)[0]

    torch.testing.assert_close(gradients["sequence_tis"], exact, rtol=1e-10, atol=1e-12)
    assert float((gradients["importance"] - exact).abs().max()) > 0.01
