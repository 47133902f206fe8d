"""What the trainer says of mismatch, weights and ages, against numbers computed here; and what it warns of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import structlog

from pipeline.config import AlgorithmSettings, Config, GenerationSettings, StalenessSettings
from pipeline.config.advice import advice
from pipeline.config.presets import PRESETS
from pipeline.learner import load_learner
from pipeline.metrics import Metrics
from tests.learning.builders import Row, make_group, make_learner, plain_logprobs, tiny_llama
from tests.tiny import make_tiny_model

LOG_RATIOS = np.array([0.3, -0.4, 1.2, 0.1, -0.2, 0.9, 0.0])
AGES = np.array([0, 0, 5, 3, 1, 1, 0])
VERSION = 5


def metrics_of(correction: str) -> dict[str, float]:
    """Two completions of tokens whose ratios and ages are those above."""
    model = tiny_llama()
    rows = []
    for ids, start in (([4, 7, 5, 2], 0), ([6, 2, 3], 4)):
        new = plain_logprobs(model, [1, 5, 3], ids).detach().numpy()
        ages = AGES[start : start + len(ids)]
        rows.append(
            Row(
                token_ids=ids,
                reward=float(start),
                generator_logprobs=(new - LOG_RATIOS[start : start + len(ids)]).tolist(),
                spans=[(VERSION - age, index) for index, age in enumerate(ages.tolist())],
            )
        )
    learner = make_learner(
        model,
        algorithm=AlgorithmSettings(correction=correction),
        staleness=StalenessSettings(max_staleness=8),
    )
    return learner.accumulate([make_group(rows)], trainer_version=VERSION)[1]


def test_mismatch_is_told_apart_at_equal_and_at_unequal_versions() -> None:
    metrics = metrics_of("tis")

    k3 = np.exp(LOG_RATIOS) - LOG_RATIOS - 1
    assert metrics["mismatch_kl"] == pytest.approx(k3.mean(), rel=1e-5)
    assert metrics["mismatch_kl_fresh"] == pytest.approx(k3[AGES == 0].mean(), rel=1e-5)
    assert metrics["mismatch_kl_stale"] == pytest.approx(k3[AGES > 0].mean(), rel=1e-5)


def test_effective_sample_size_is_that_of_the_importance_ratios() -> None:
    ratios = np.exp(LOG_RATIOS)
    expected = ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum())
    assert metrics_of("tis")["effective_sample_size"] == pytest.approx(expected, rel=1e-5)


def test_shares_and_quantiles_are_by_age_and_ages_from_three_on_are_one() -> None:
    cut, masked = metrics_of("tis"), metrics_of("mis")

    for age in range(4):
        ratios = np.exp(LOG_RATIOS[(age == AGES) if age < 3 else (AGES >= 3)])
        if not len(ratios):
            assert not any(name.endswith(f"_age_{age}") for name in cut)
            continue
        assert cut[f"tokens_age_{age}"] == len(ratios)
        assert cut[f"truncated_fraction_age_{age}"] == pytest.approx((ratios > 2).mean())
        assert masked[f"masked_fraction_age_{age}"] == pytest.approx((ratios > 2).mean())
        assert cut[f"masked_fraction_age_{age}"] == 0
        for name, share in (("p01", 0.01), ("p50", 0.5), ("p99", 0.99)):
            expected = np.exp(np.quantile(np.log(ratios), share))
            assert cut[f"ratio_{name}_age_{age}"] == pytest.approx(expected, rel=1e-5)


def test_what_is_by_age_is_on_metrics_for_the_ages_that_there_are() -> None:
    metrics, row = Metrics("r", "trainer", "w"), metrics_of("tis")

    metrics.observe_ages(row)

    labels = {"run": "r", "role": "trainer", "worker": "w"}
    for age in "0123":
        ratio = metrics.registry.get_sample_value(
            "rollstream_importance_ratio_by_age", {**labels, "age": age, "share": "0.99"}
        )
        cut = metrics.registry.get_sample_value(
            "rollstream_cut_fraction_by_age", {**labels, "age": age, "cut": "truncated"}
        )
        assert ratio == row.get(f"ratio_p99_age_{age}")
        assert cut == row.get(f"truncated_fraction_age_{age}")


def test_frozen_policy_has_no_mismatch_and_all_of_its_sample() -> None:
    """L6."""
    model = tiny_llama()
    ids = [4, 7, 5]
    old = plain_logprobs(model, [1, 5, 3], ids).tolist()
    rows = [Row(token_ids=ids, reward=reward, generator_logprobs=old) for reward in (0.0, 1.0)]

    _, metrics = make_learner(model).accumulate([make_group(rows)], trainer_version=1)

    assert metrics["mismatch_kl_fresh"] == 0
    assert metrics["mismatch_kl_stale"] == pytest.approx(0, abs=1e-12)
    assert metrics["effective_sample_size"] == pytest.approx(1, abs=1e-9)
    assert metrics["ratio_p99_age_1"] == pytest.approx(1, abs=1e-5)


def test_step_without_anything_to_train_on_has_diagnostics_without_ages() -> None:
    _, metrics = make_learner(tiny_llama()).accumulate(
        [make_group([Row(token_ids=[4], reward=None)])], trainer_version=0
    )
    assert (metrics["effective_sample_size"], metrics["mismatch_kl_fresh"]) == (1, 0)
    assert not any("_age_" in name for name in metrics)


TRUNCATED = GenerationSettings(top_p=0.9, replay_sampling_mask=False)


@pytest.mark.parametrize(
    ("algorithm", "generation", "max_staleness", "said"),
    [
        ({}, GenerationSettings(), 4, None),
        ({}, GenerationSettings(top_p=0.9), 4, None),
        ({}, TRUNCATED, 0, "generation.replay_sampling_mask = false"),
        ({"correction": "importance"}, GenerationSettings(), 1, None),
        ({"correction": "importance"}, GenerationSettings(), 2, "variance grows with age"),
        ({"kl_estimator": "k1"}, GenerationSettings(), 2, "does nothing with algorithm.kl_coef = 0; set kl_coef ab"),
        ({"jsd_beta": 1.0}, GenerationSettings(), 2, "jsd_beta = 1.0 does nothing with algorithm.jsd_coef = 0"),
        ({"jsd_beta": 1.0, "jsd_coef": 0.5}, GenerationSettings(), 2, None),
        ({"loss": "gspo"}, GenerationSettings(), 2, "loss = 'gspo' does nothing of its own with algorithm.proximal"),
        ({"preset": "cispo", "correction": "icepop"}, GenerationSettings(), 2, "loss = 'cispo' does nothing of its"),
        ({"loss": "gspo", "correction": "none"}, GenerationSettings(), 2, None),
        ({"loss": "gspo", "proximal": "interpolated"}, GenerationSettings(), 2, None),
        ({"kl_estimator": "k1", "kl_coef": 0.1}, GenerationSettings(), 2, "only adds noise"),
        ({"kl_estimator": "k1", "kl_coef": 0.1, "kl_in": "reward"}, GenerationSettings(), 2, None),
        ({"kl_estimator": "k1", "kl_coef": 0.1, "kl_importance": True}, GenerationSettings(), 2, None),
        (
            {"kl_estimator": "k2", "kl_coef": 0.1, "kl_importance": True},
            GenerationSettings(),
            2,
            "is not the divergence",
        ),
        ({"kl_estimator": "k2", "kl_coef": 0.1}, GenerationSettings(), 2, None),
        ({"correction": "none", "proximal": "recomputed"}, GenerationSettings(), 0, None),
        ({}, GenerationSettings(group_size=1), 2, "nothing would be learnt"),
        ({"preset": "reinforce_pp"}, GenerationSettings(group_size=1), 2, None),
        ({"correction": "none", "proximal": "recomputed"}, GenerationSettings(), 2, "as if they were new"),
        (
            {"clip_high": 0.3},
            GenerationSettings(),
            2,
            "clip_high = 0.3 does nothing with algorithm.proximal = 'recomputed'",
        ),
        ({"clip_high": 0.3, "preset": "dapo"}, GenerationSettings(), 2, None),
        ({"clip_high": 0.3, "preset": "decoupled_ppo"}, GenerationSettings(), 2, None),
        (
            {"dual_clip": 3.0, "preset": "gspo"},
            GenerationSettings(),
            2,
            "with algorithm.loss = 'gspo'; set loss to 'ppo",
        ),
        ({"truncation": 3.0, "correction": "icepop"}, GenerationSettings(), 2, "set correction to 'tis' or 'mis'"),
        ({"overlong_penalty": 0.5}, GenerationSettings(), 2, "overlong = false; set overlong to true"),
        ({"overlong_penalty": 0.5, "preset": "dapo"}, GenerationSettings(), 2, None),
    ],
)
def test_choices_that_are_known_to_fail_are_said_with_the_way_out(
    algorithm: dict[str, object], generation: GenerationSettings, max_staleness: int, said: str | None
) -> None:
    settings = AlgorithmSettings.model_validate(algorithm)
    found = advice(settings, generation, StalenessSettings(max_staleness=max_staleness))
    assert len(found) == (said is not None)
    assert said is None or (said in found[0] and "set " in found[0])


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_as_it_stands_needs_no_advice(preset: str) -> None:
    assert advice(AlgorithmSettings(preset=preset), GenerationSettings(), StalenessSettings()) == []


def test_trainer_says_it_once_when_it_starts(tmp_path: Path) -> None:
    config = Config.model_validate(
        {
            "model": {"path": str(make_tiny_model(tmp_path))},
            "trainer": {"device": "cpu"},
            "algorithm": {"kl_coef": 0.1, "kl_estimator": "k1"},
        }
    )
    with structlog.testing.capture_logs() as logs:
        load_learner(config)
    (entry,) = [log for log in logs if log["event"] == "algorithm_advice"]
    assert entry["log_level"] == "warning"
    assert "only adds noise" in entry["advice"]
