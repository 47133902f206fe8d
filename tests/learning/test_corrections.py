"""Corrections and proximal policies against formulas written here from the papers, in float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.algorithms import CORRECTIONS, PROXIMALS, m2po_limit
from pipeline.config import AlgorithmSettings
from pipeline.config.algorithm import WEIGHTING
from tests.learning.batches import correction_inputs, doubles

Array = npt.NDArray[np.float64]

TOKENS = np.log([0.1, 0.5, 0.9, 1.0, 1.9, 2.0, 2.1, 7.0])
ROWS = np.array([[0.5, 0.4, -0.3, 0.9], [-0.2, -0.1, 9.0, 9.0], [0.01, -0.02, 0.02, 9.0], [9.0, 9.0, 9.0, 9.0]])
MASK = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]], dtype=bool)
"""Four completions; what is outside the mask must not matter."""


def weights(name: str, log_ratios: Array, **changes: object) -> tuple[Array, dict[str, Array]]:
    settings = AlgorithmSettings.model_validate(changes).resolved
    result = CORRECTIONS[name](correction_inputs(torch.tensor(log_ratios)), settings)
    return result.weights.numpy(), {key: value.numpy() for key, value in result.stats.items()}


def of_rows(name: str, advantages: Array | None = None, **changes: object) -> tuple[Array, dict[str, Array]]:
    settings = AlgorithmSettings.model_validate(changes).resolved
    result = CORRECTIONS[name](
        correction_inputs(
            torch.tensor(np.where(MASK, ROWS, 0.0)),
            None if advantages is None else torch.tensor(advantages),
            torch.tensor(MASK),
        ),
        settings,
    )
    return result.weights.numpy(), {key: value.numpy() for key, value in result.stats.items()}


def test_no_correction_weighs_every_token_alike() -> None:
    np.testing.assert_array_equal(weights("none", TOKENS[None])[0], np.ones((1, 8)))


def test_importance_sampling_weighs_by_the_ratio() -> None:
    np.testing.assert_allclose(weights("importance", TOKENS[None])[0][0], np.exp(TOKENS), rtol=1e-12)


def test_truncated_importance_sampling_weighs_each_token_up_to_the_cap() -> None:
    result, stats = weights("tis", TOKENS[None], truncation=2.05)
    np.testing.assert_allclose(result[0], [0.1, 0.5, 0.9, 1.0, 1.9, 2.0, 2.05, 2.05], rtol=1e-12)
    np.testing.assert_array_equal(stats["truncated_fraction"][0], [0, 0, 0, 0, 0, 0, 1, 1])


def test_masked_importance_sampling_drops_what_is_above_the_cap() -> None:
    result, stats = weights("mis", TOKENS[None], truncation=2.05)
    np.testing.assert_allclose(result[0], [0.1, 0.5, 0.9, 1.0, 1.9, 2.0, 0, 0], rtol=1e-12)
    np.testing.assert_array_equal(stats["masked_fraction"][0], [0, 0, 0, 0, 0, 0, 1, 1])


def test_icepop_keeps_what_is_within_its_band() -> None:
    result, stats = weights("icepop", TOKENS[None], band_low=0.45, band_high=5.0)
    np.testing.assert_allclose(result[0], [0, 0.5, 0.9, 1.0, 1.9, 2.0, 2.1, 0], rtol=1e-12)
    np.testing.assert_array_equal(stats["masked_fraction"][0], [1, 0, 0, 0, 0, 0, 0, 1])


PRODUCTS = np.exp([0.5 + 0.4 - 0.3 + 0.9, -0.3, 0.01, 0.0])
MEANS = np.exp([1.5 / 4, -0.3 / 2, 0.01 / 3, 0.0])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sequence_tis", np.minimum(PRODUCTS, 1.3)),
        ("sequence_mis", np.where(PRODUCTS <= 1.3, PRODUCTS, 0.0)),
        ("geometric_tis", np.minimum(MEANS, 1.3)),
        ("geometric_mis", np.where((MEANS <= 1.1) & (MEANS >= 1 / 1.1), MEANS, 0.0)),
    ],
)
def test_correction_of_completions_gives_all_their_tokens_one_weight(name: str, expected: Array) -> None:
    result, stats = of_rows(name, truncation=1.3, geometric_band=1.1)

    np.testing.assert_allclose(result, np.tile(expected[:, None], (1, 4)), rtol=1e-12)
    unbounded = PRODUCTS if name.startswith("sequence") else MEANS
    (cut,) = stats.values()
    np.testing.assert_array_equal(cut, np.tile((expected != unbounded)[:, None], (1, 4)))
    assert 0 < cut.mean() < 1


def test_off_policy_sequences_are_masked_when_they_are_mistakes() -> None:
    divergences = -np.array([1.5 / 4, -0.3 / 2, 0.01 / 3, 0.0])
    advantages = np.array([-1.0, -1.0, 1.0, -1.0])[:, None] * np.ones((4, 4))
    result, _ = of_rows("opsm", advantages, opsm_max=0.1)
    np.testing.assert_array_equal(result[:, 0], 1.0 - ((divergences > 0.1) & (advantages[:, 0] < 0)))
    np.testing.assert_array_equal(of_rows("opsm", -advantages, opsm_max=0.1)[0], np.ones((4, 4)))


def greedy(log_ratios: Array, advantages: Array, limit: float) -> npt.NDArray[np.bool_]:
    """M2PO told step by step: drop the farthest token that is pushed further, until the mean square is small."""
    is_kept = np.ones(len(log_ratios), dtype=bool)
    while is_kept.any() and np.mean(log_ratios[is_kept] ** 2) > limit:
        candidates = np.flatnonzero(is_kept & (advantages * log_ratios > 0))
        if not len(candidates):
            break
        is_kept[candidates[np.argmax(np.abs(log_ratios[candidates]))]] = False
    return is_kept


@given(st.lists(st.tuples(st.floats(-2, 2), st.sampled_from([-1.0, 0.0, 1.0])), min_size=1, max_size=20, unique=True))
def test_m2po_drops_the_farthest_tokens_until_the_second_moment_is_small(tokens: list[tuple[float, float]]) -> None:
    log_ratios, advantages = np.array([x for x, _ in tokens]), np.array([a for _, a in tokens])
    if len(np.unique(np.abs(log_ratios))) < len(log_ratios):
        return  # of equals it keeps all, where a greedy search drops one
    settings = AlgorithmSettings(m2po_max=0.3).resolved

    limit = m2po_limit(torch.tensor(log_ratios), torch.tensor(advantages), settings)
    inputs = correction_inputs(torch.tensor(log_ratios)[None], torch.tensor(advantages)[None], limit=float(limit))
    result = CORRECTIONS["m2po"](inputs, settings).weights[0].numpy()

    np.testing.assert_array_equal(result, greedy(log_ratios, advantages, 0.3).astype(float))


def test_m2po_leaves_a_batch_that_is_near_alone() -> None:
    limit = m2po_limit(doubles([0.1, -0.1]), doubles([1, 1]), AlgorithmSettings().resolved)
    assert float(limit) == np.inf


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_equal_policies_need_no_correction(name: str) -> None:
    """L6: all weights are 1, and nothing is cut or masked."""
    settings = AlgorithmSettings().resolved
    result = CORRECTIONS[name](correction_inputs(torch.zeros(3, 4).double(), limit=np.inf), settings)
    np.testing.assert_array_equal(result.weights.numpy(), np.ones((3, 4)))
    assert not any(value.any() for value in result.stats.values())


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
@pytest.mark.parametrize("gap", [-20.0, 20.0])
def test_weights_of_the_largest_gap_are_finite(name: str, gap: float) -> None:
    """Twenty nats at each of fifty tokens."""
    inputs = correction_inputs(torch.full((2, 50), gap).double(), limit=1.0)
    assert torch.isfinite(CORRECTIONS[name](inputs, AlgorithmSettings().resolved).weights).all()


def test_corrections_that_weigh_are_known_as_such() -> None:
    """Those whose weights are not 0 or 1 need something other than the generator to be held against it."""
    inputs = correction_inputs(torch.full((1, 3), 0.01).double(), limit=np.inf)
    weighing = {
        name
        for name, function in CORRECTIONS.items()
        if (function(inputs, AlgorithmSettings().resolved).weights != 1).any()
    }
    assert weighing == WEIGHTING


TRAINER, GENERATOR, AGES = doubles([-1.0] * 4), doubles([-1.5] * 4), torch.tensor([0, 1, 2, 5])


def test_proximal_policy_is_the_generator_or_the_trainer_before_the_update() -> None:
    assert PROXIMALS["generator"](TRAINER, GENERATOR, AGES) is GENERATOR
    assert PROXIMALS["recomputed"](TRAINER, GENERATOR, AGES) is TRAINER


def test_interpolated_proximal_policy_is_one_version_behind_by_the_age_of_each_token() -> None:
    """A-3PO: log prox = (1/d) log mu + (1 - 1/d) log pi; a token of age 0 is the trainer's own."""
    expected = [-1.0, -1.5, 0.5 * -1.5 + 0.5 * -1.0, 0.2 * -1.5 + 0.8 * -1.0]
    np.testing.assert_allclose(PROXIMALS["interpolated"](TRAINER, GENERATOR, AGES).numpy(), expected, rtol=1e-12)
