"""Every preset as a whole: its loss and gradient against the paper's formula, and what must not matter (L1-L6)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from pipeline.config import AlgorithmSettings, StalenessSettings
from pipeline.config.presets import PRESETS
from tests.learning.builders import Row, gradients, make_group, make_learner, plain_logprobs, random_groups, tiny_llama
from tests.learning.nucleus import nucleus_group
from tests.learning.papers import VERSION, advantages, aggregated, groups_of, paper_loss, seen

KEEP_ALL = StalenessSettings(max_staleness=8)
each_preset = pytest.mark.parametrize("preset", sorted(set(PRESETS) - {"opd"}))  # which learns from no rewards


@each_preset
def test_loss_and_gradient_agree_with_the_paper(preset: str) -> None:
    model = tiny_llama(1)
    groups = groups_of(model)
    learner = make_learner(model, algorithm=AlgorithmSettings(preset=preset), staleness=KEEP_ALL)

    loss, metrics = learner.accumulate(groups, trainer_version=VERSION)
    ours = gradients(model)
    model.zero_grad()
    expected = paper_loss(preset, seen(model, groups))
    expected.backward()

    assert loss.item() == pytest.approx(expected.item(), rel=1e-9, abs=1e-12)
    for name, value in gradients(model).items():
        torch.testing.assert_close(ours[name], value, rtol=1e-7, atol=1e-10)
    assert metrics["nonfinite_tokens"] == metrics["overlong_completions"] == 0


SURVEYED = {"rloo": {"kl_coef": 0.1}, "reinforce_pp": {"kl_coef": 0.1}, "dapo": {"correction": "m2po"}}


@each_preset
@pytest.mark.parametrize("is_surveyed", [False, True])
def test_loss_and_gradient_do_not_depend_on_split_order_or_padding(preset: str, is_surveyed: bool) -> None:
    """L1: alone, in pairs, all at once; in the order of arrival or backwards; with what is seen of the whole batch."""
    model, reference = tiny_llama(), tiny_llama(2)
    extra = SURVEYED.get(preset, {"kl_coef": 0.1, "kl_in": "reward", "correction": "m2po", "proximal": ""})
    settings = AlgorithmSettings.model_validate({"preset": preset, **(extra if is_surveyed else {})})
    groups = groups_of(model)
    results = []
    for budget, order in [(1, 1), (30, -1), (61, 1), (10**6, -1)]:
        model.zero_grad()
        learner = make_learner(
            model,
            algorithm=settings,
            trainer={"micro_batch_tokens": budget},
            staleness=KEEP_ALL,
            reference=reference if settings.kl_coef else None,
        )
        loss, metrics = learner.accumulate(groups[::order], trainer_version=VERSION)
        for name in ("forward_tokens", "shared_prompt_tokens"):
            del metrics[name]  # of the split itself
        results.append((loss.item(), gradients(model), metrics))

    first_loss, first_gradients, first_metrics = results[0]
    for loss, gradient, metrics in results[1:]:
        assert loss == pytest.approx(first_loss, rel=1e-9, abs=1e-12)
        assert metrics == pytest.approx(first_metrics, rel=1e-8, abs=1e-11)
        for name, value in gradient.items():
            torch.testing.assert_close(value, first_gradients[name], rtol=1e-7, atol=1e-11)


@each_preset
def test_equal_weights_have_ratio_one_and_the_plain_policy_gradient(preset: str) -> None:
    """L2 and L6, at temperature 0.6: nothing is cut, and the gradient is -A for each logprob."""
    model = tiny_llama()
    groups = random_groups(model, temperature=0.6)
    learner = make_learner(model, algorithm=AlgorithmSettings(preset=preset))

    _, metrics = learner.accumulate(groups, trainer_version=0)
    ours = gradients(model)
    model.zero_grad()
    all_seen = seen(model, groups)
    rows = [-a * one.new for one, a in zip(all_seen, advantages(preset, all_seen), strict=True)]
    plain = aggregated(preset, rows)
    plain.backward()

    assert metrics["importance_ratio_mean"] == pytest.approx(1, abs=1e-6)
    assert metrics["importance_ratio_max"] == pytest.approx(1, abs=1e-5)
    assert metrics["mismatch_kl"] == pytest.approx(0, abs=1e-10)
    assert metrics["clip_fraction"] == metrics["truncated_fraction"] == metrics["masked_fraction"] == 0
    for name, value in gradients(model).items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6)


@each_preset
def test_equal_weights_have_ratio_one_with_top_p_when_the_mask_is_replayed(preset: str) -> None:
    """L2."""
    model = tiny_llama()
    learner = make_learner(model, algorithm=AlgorithmSettings(preset=preset))

    _, replayed = learner.accumulate([nucleus_group(model, is_replayed=True)], trainer_version=0)
    _, missing = learner.accumulate([nucleus_group(model, is_replayed=False)], trainer_version=0)

    assert replayed["importance_ratio_mean"] == pytest.approx(1, abs=1e-6)
    assert (replayed["clip_fraction"], replayed["unreplayed_tokens"]) == (0, 0)
    assert missing["importance_ratio_mean"] < 0.99
    assert missing["unreplayed_tokens"] == 12


@each_preset
@pytest.mark.parametrize("bad", [-92.0, 88.0, -math.inf, math.nan])
def test_impossible_generator_logprob_is_masked_and_counted(preset: str, bad: float) -> None:
    """L3: loss and gradient are those of the other tokens."""
    model = tiny_llama()
    clean = [Row(token_ids=[4, 7], reward=1.0), Row(token_ids=[6, 2], reward=0.0)]
    faulty = [replace(clean[0], generator_logprobs=[-1.0, bad]), clean[1]]
    learner = make_learner(model, algorithm=AlgorithmSettings(preset=preset))

    loss, metrics = learner.accumulate([make_group(faulty)], trainer_version=0)
    found = gradients(model)
    step = learner.step([make_group(faulty)], trainer_version=0)

    assert math.isfinite(loss.item())
    assert all(torch.isfinite(value).all() for value in found.values())
    assert (metrics["nonfinite_tokens"], metrics["trained_tokens"]) == (1, 3)
    assert step["skipped_steps"] == 0
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


@each_preset
def test_member_without_reward_leaves_the_others_as_if_it_were_not_there(preset: str) -> None:
    """L4."""
    model = tiny_llama()
    scored = [Row(token_ids=[4, 7], reward=1.0), Row(token_ids=[6, 2, 3], reward=0.0)]
    unscored = Row(token_ids=[9, 9, 9, 9], reward=None)
    results = []
    for rows in (scored, [scored[0], unscored, scored[1]]):
        model.zero_grad()
        learner = make_learner(model, algorithm=AlgorithmSettings(preset=preset))
        loss, metrics = learner.accumulate([make_group(rows)], trainer_version=0)
        results.append((loss.item(), gradients(model)))

    assert results[0][0] == pytest.approx(results[1][0], rel=1e-10)
    for name, value in results[0][1].items():
        torch.testing.assert_close(value, results[1][1][name], rtol=1e-8, atol=1e-12)
    assert metrics["unscored_completions"] == 1


@each_preset
def test_completion_that_is_alone_is_learnt_nothing_from(preset: str) -> None:
    """L4: one scored member has advantage 0, not NaN."""
    model = tiny_llama()
    learner = make_learner(model, algorithm=AlgorithmSettings(preset=preset))

    loss, metrics = learner.accumulate([make_group([Row(token_ids=[4, 7], reward=1.0)])], trainer_version=0)

    assert (loss.item(), metrics["advantage_abs_mean"]) == (0, 0)
    assert not any(value.any() for value in gradients(model).values())


@each_preset
def test_masked_tokens_leave_sequence_and_token_alone_what_is_left(preset: str) -> None:
    """L5 and S5: a completion of which old tokens are masked is trained as if it had only the others to train."""
    model = tiny_llama()
    rows = [
        Row(token_ids=[4, 7, 5], reward=1.0, spans=((1, 0), (3, 2)), generator_logprobs=[-9.0, -0.1, -1.0]),
        Row(token_ids=[6, 2], reward=0.0, spans=((3, 0),)),
    ]
    by_mask = [replace(rows[0], loss_mask=[0, 0, 1], spans=((3, 0),)), rows[1]]
    staleness = StalenessSettings(max_staleness=1, policy="mask")
    results = []
    for chosen in (rows, by_mask):
        model.zero_grad()
        learner = make_learner(model, algorithm=AlgorithmSettings(preset=preset), staleness=staleness)
        loss, metrics = learner.accumulate([make_group(chosen)], trainer_version=3)
        results.append((loss.item(), gradients(model), metrics["trained_tokens"]))

    assert results[0][0] == pytest.approx(results[1][0], rel=1e-12)
    assert results[0][2] == results[1][2] == 3
    for name, value in results[0][1].items():
        torch.testing.assert_close(value, results[1][1][name], rtol=1e-10, atol=1e-13)


@each_preset
def test_training_raises_the_probability_of_what_is_rewarded(preset: str) -> None:
    model = tiny_llama(dtype=torch.float32)
    learner = make_learner(model, algorithm=AlgorithmSettings(preset=preset))
    before = plain_logprobs(model, [1, 5, 3], [4, 7]).sum().item()
    for version in range(10):
        rows = [
            Row(
                token_ids=ids,
                reward=reward,
                spans=((version, 0),),
                generator_logprobs=plain_logprobs(model, [1, 5, 3], ids).tolist(),
            )
            for ids, reward in (([4, 7], 1.0), ([6, 2], 0.0))
        ]
        learner.step([make_group(rows)], trainer_version=version)

    assert plain_logprobs(model, [1, 5, 3], [4, 7]).sum().item() > before + 0.5
