"""Advantages against formulas written here from the papers, in float64 and one completion at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.algorithms import ADVANTAGES, with_process_rewards
from pipeline.config import AlgorithmSettings
from tests.learning.batches import doubles, reward_batch, without_reward

DEFAULTS = AlgorithmSettings().resolved
GROUP_RELATIVE = sorted(set(ADVANTAGES) - {"reinforce_pp", "reinforce_pp_baseline"})
NAN = math.nan


def advantages(name: str, groups: Sequence[Sequence[float | None]], **options: object) -> npt.NDArray[np.float64]:
    if name == "gdpo" and "parts" not in options:
        options |= {"parts": [[reward] for group in groups for reward in group], "weights": [1.0]}
    result: npt.NDArray[np.float64] = ADVANTAGES[name](reward_batch(groups, **options), DEFAULTS).numpy()
    return result


FIRST, SECOND = [0.0, 1.0, 1.0, 5.0], [2.0, 3.0]


def by_group(formula: object) -> npt.NDArray[np.float64]:
    return np.concatenate([formula(np.array(group)) for group in (FIRST, SECOND)])  # type: ignore[operator]


def test_grpo_advantage_is_the_standard_score_inside_the_group() -> None:
    expected = by_group(lambda r: (r - r.mean()) / (r.std() + 1e-6))
    np.testing.assert_allclose(advantages("group_mean_std", [FIRST, SECOND]), expected, rtol=1e-12)


def test_dr_grpo_advantage_is_the_reward_less_the_mean() -> None:
    np.testing.assert_allclose(advantages("group_mean", [FIRST, SECOND]), by_group(lambda r: r - r.mean()), rtol=1e-12)


def test_rloo_advantage_is_the_reward_less_the_mean_of_the_others() -> None:
    expected = by_group(lambda r: np.array([r[i] - np.delete(r, i).mean() for i in range(len(r))]))
    np.testing.assert_allclose(advantages("rloo", [FIRST, SECOND]), expected, rtol=1e-12)


def test_maxrl_advantage_is_relative_to_the_mean() -> None:
    np.testing.assert_allclose(
        advantages("maxrl", [FIRST, SECOND]), by_group(lambda r: (r - r.mean()) / r.mean()), rtol=1e-12
    )


def test_maxrl_gradient_tends_to_that_of_the_log_probability_of_success() -> None:
    """For 0/1 rewards: E[sum_i A_i score_i] / n against d log p / d theta = (1 - p) of a Bernoulli(p) in its logit."""
    p, n = 0.3, 12
    expectation = 0.0
    for successes in range(n + 1):
        chance = math.comb(n, successes) * p**successes * (1 - p) ** (n - successes)
        rewards = [1.0] * successes + [0.0] * (n - successes)
        scores = np.array([1 - p if reward else -p for reward in rewards])
        expectation += chance * float((advantages("maxrl", [rewards]) * scores).mean())
    assert expectation == pytest.approx((1 - p), abs=0.02)
    assert abs(expectation - p * (1 - p)) > 0.4  # which is the gradient of p itself


def test_maxrl_of_rewards_without_a_positive_mean_is_zero() -> None:
    assert not advantages("maxrl", [[-1.0, 1.0], [-2.0, -1.0]]).any()


def test_maxrl_divides_by_the_share_of_successes_whatever_is_taken_off() -> None:
    """Long completions and the KL term would bring the mean of what is left to 0, and below."""
    taken = {"shaping": [-0.5, 0.0, 0.0], "penalties": [0.2, 0.7, 0.1]}
    values = np.array([0.5, 0.0, 0.0]) - np.array(taken["penalties"])
    found = ADVANTAGES["maxrl"](reward_batch([[0.5, 0.0, 0.0]], **taken), DEFAULTS)
    np.testing.assert_allclose(found.numpy(), (values - values.mean()) * 3, rtol=1e-12)


def test_opo_baseline_weighs_rewards_by_length() -> None:
    rewards, lengths = [1.0, 0.0, 3.0], [2, 1, 5]
    baseline = (2 * 1.0 + 1 * 0.0 + 5 * 3.0) / 8
    expected = np.repeat(np.array(rewards) - baseline, lengths)
    np.testing.assert_allclose(advantages("opo", [rewards], lengths=lengths), expected, rtol=1e-12)


def test_opo_counts_only_trained_tokens() -> None:
    result = advantages("opo", [[1.0, 0.0]], lengths=[2, 3], mask=[1, 0, 1, 1, 1])
    np.testing.assert_allclose(result, np.repeat([1 - 1 / 4, -1 / 4], [2, 3]), rtol=1e-12)


def test_reinforce_pp_is_normalised_over_all_trained_tokens() -> None:
    rewards, lengths, mask = [1.0, 0.0, 3.0, None], [2, 1, 3, 2], [1, 1, 1, 1, 0, 1, 1, 1]
    values = np.repeat([1.0, 0.0, 3.0], [2, 1, 3])
    trained = values[np.array(mask[:6], dtype=bool)]
    expected = (values - trained.mean()) / (trained.std() + 1e-6)
    result = advantages("reinforce_pp", [rewards[:2], rewards[2:]], lengths=lengths, mask=mask)
    np.testing.assert_allclose(result[:6], expected, rtol=1e-12)
    assert not result[6:].any()


def test_reinforce_pp_takes_off_the_penalties_that_are_still_to_come() -> None:
    penalties = [0.1, 0.2, 0.4, 0.8, 1.6]
    values = np.array([1 - 0.3, 1 - 0.2, 0 - 2.8, 0 - 2.4, 0 - 1.6])
    result = advantages("reinforce_pp", [[1.0], [0.0]], lengths=[2, 3], penalties=penalties)
    np.testing.assert_allclose(result, (values - values.mean()) / (values.std() + 1e-6), rtol=1e-12)


def test_reinforce_pp_with_baseline_centres_in_the_group_before_it_normalises() -> None:
    values = np.repeat([0.5, -0.5, 1.0, -1.0], [2, 1, 1, 3])
    result = advantages("reinforce_pp_baseline", [[1.0, 0.0], [4.0, 2.0]], lengths=[2, 1, 1, 3])
    np.testing.assert_allclose(result, (values - values.mean()) / (values.std() + 1e-6), rtol=1e-12)


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
def test_batch_of_equal_rewards_has_advantage_exactly_zero(name: str) -> None:
    assert not advantages(name, [[0.1, 0.1], [0.1]], lengths=[2, 3, 1]).any()


def test_gdpo_normalises_each_reward_apart() -> None:
    parts = [[1.0, 10.0], [0.0, 30.0], [1.0, 10.0], [1.0, None], [0.0, 20.0], [0.0, 40.0]]
    weights = [0.5, 2.0]
    groups = [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    summed = np.zeros(6)
    for k, weight in enumerate(weights):
        for rows in ([0, 1, 2], [3, 4, 5]):
            present = [row for row in rows if parts[row][k] is not None]
            values = np.array([parts[row][k] for row in present])
            summed[present] += weight * (values - values.mean()) / (values.std() + 1e-6)
    expected = summed / (summed.std() + 1e-6)
    np.testing.assert_allclose(advantages("gdpo", groups, parts=parts, weights=weights), expected, rtol=1e-10)


def test_gdpo_keeps_apart_what_a_sum_would_drown() -> None:
    """Two completions with equal sums and unlike parts get unlike advantages where the spreads differ."""
    parts = [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    result = advantages("gdpo", [[1.0, 1.0, 0.0, 2.0, 0.0]], parts=parts, weights=[1.0, 3.0])
    assert abs(result[0] - result[1]) > 0.1


def test_gdpo_adds_shaping_that_no_function_gave() -> None:
    parts = [[1.0], [0.0]]
    plain = (np.array([1.0, 0.0]) - 0.5) / 0.500001
    summed = plain + np.array([-0.5, 0.5])
    result = advantages("gdpo", [[0.0, 0.0]], parts=parts, weights=[1.0], shaping=[-1.0, 0.0])
    np.testing.assert_allclose(result, summed / (summed.std() + 1e-6), rtol=1e-10, atol=1e-12)


def test_missing_reward_stays_out_of_the_baseline_and_gets_advantage_zero() -> None:
    np.testing.assert_allclose(advantages("group_mean", [[1.0, None, 4.0]]), [-1.5, 0.0, 1.5])
    np.testing.assert_allclose(advantages("group_mean_std", [[1.0, None, 4.0]]), [-1.5 / 1.500001, 0.0, 1.5 / 1.500001])
    np.testing.assert_allclose(advantages("rloo", [[1.0, None, 4.0]]), [-3.0, 0.0, 3.0])
    np.testing.assert_allclose(advantages("maxrl", [[1.0, None, 4.0]]), [-0.6, 0.0, 0.6])


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_completion_without_reward_changes_nothing_for_the_others(name: str) -> None:
    options = {"parts": [[1.0], [0.0], [7.0], [3.0]], "weights": [1.0]} if name == "gdpo" else {}
    batch = without_reward(reward_batch([[1.0, 0.0, 7.0, 3.0]], lengths=[2, 1, 4, 3], **options), 2)
    options = {"parts": [[1.0], [0.0], [3.0]], "weights": [1.0]} if name == "gdpo" else {}
    alone = ADVANTAGES[name](reward_batch([[1.0, 0.0, 3.0]], lengths=[2, 1, 3], **options), DEFAULTS)

    result = ADVANTAGES[name](batch, DEFAULTS)

    torch.testing.assert_close(torch.cat([result[:3], result[7:]]), alone, rtol=1e-12, atol=1e-14)
    assert not result[3:7].any()


@pytest.mark.parametrize("name", GROUP_RELATIVE)
@pytest.mark.parametrize("group", [[0.7], [0.1, 0.1, 0.1], [None, 3.0], [None, None]])
def test_group_without_a_difference_has_advantage_exactly_zero(name: str, group: list[float | None]) -> None:
    assert not advantages(name, [group, [0.0, 1.0]])[: len(group)].any()


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_no_groups_have_no_advantages(name: str) -> None:
    assert advantages(name, []).shape == (0,)


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES) - {"none"}))
def test_a_penalty_is_taken_off_before_the_baseline(name: str) -> None:
    """As a lower reward would be, where the method looks at whole completions."""
    options = {"parts": [[2.0], [1.0], [4.0]], "weights": [1.0]} if name == "gdpo" else {}
    penalised = reward_batch([[2.0, 1.0, 4.0]], lengths=[2, 1, 2], penalties=[0.1, 0.2, 0.0, 0.3, 0.5], **options)
    result = ADVANTAGES[name](penalised, DEFAULTS)
    assert float(result[0]) != float(ADVANTAGES[name](reward_batch([[2.0, 1.0, 4.0]], **options), DEFAULTS)[0])
    if name not in {"gdpo", "maxrl", "reinforce_pp", "reinforce_pp_baseline"}:
        lower = ADVANTAGES[name](reward_batch([[1.7, 1.0, 3.2]], lengths=[2, 1, 2]), DEFAULTS)
        torch.testing.assert_close(result, lower, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@given(
    st.lists(st.lists(st.one_of(st.none(), st.floats(-5, 5)), min_size=1, max_size=5), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_order_of_members_and_groups_does_not_matter(
    name: str, groups: list[list[float | None]], random: object
) -> None:
    """L4, and every advantage is finite whatever the rewards are."""
    order = [(g, m) for g, group in enumerate(groups) for m in range(len(group))]
    expected = dict(zip(order, advantages(name, groups), strict=True))
    shuffled = [(g, sorted(range(len(group)), key=lambda _: random.random())) for g, group in enumerate(groups)]  # type: ignore[attr-defined]
    shuffled.sort(key=lambda _: random.random())  # type: ignore[attr-defined]

    result = advantages(name, [[groups[g][m] for m in members] for g, members in shuffled])

    assert np.isfinite(result).all()
    for (g, members), start in zip(shuffled, np.cumsum([0, *(len(members) for _, members in shuffled)]), strict=False):
        for offset, member in enumerate(members):
            assert result[start + offset] == pytest.approx(expected[g, member], rel=1e-6, abs=1e-6)


def process(
    kind: str, rewards: Sequence[float], *, lengths: Sequence[int], **options: object
) -> npt.NDArray[np.float64]:
    settings = AlgorithmSettings.model_validate({"process": kind, "process_weight": 0.5}).resolved
    groups = [[1.0] * len(lengths)]
    batch = reward_batch(groups, lengths=lengths, token_rewards=rewards, **options)
    outcome = batch.spread(doubles([2.0, -1.0][: len(lengths)]))
    result: npt.NDArray[np.float64] = with_process_rewards(batch, outcome, settings).numpy()
    return result


STEPS = [NAN, 0.2, NAN, 0.9, 0.5, NAN, 0.1, NAN]
"""Two completions of 4 tokens: steps end at 1 and 3, and at 0 and 2; nothing belongs to the last token."""
SCORES = (np.array([0.2, 0.9, 0.5, 0.1]) - np.mean([0.2, 0.9, 0.5, 0.1])) / (np.std([0.2, 0.9, 0.5, 0.1]) + 1e-6)


def test_returns_of_steps_are_the_standard_scores_still_to_come() -> None:
    a, b, c, d = SCORES
    expected = np.array([2.0] * 4 + [-1.0] * 4) + 0.5 * np.array([a + b, a + b, b, b, c + d, d, d, 0])
    np.testing.assert_allclose(process("returns", STEPS, lengths=[4, 4]), expected, rtol=1e-12)


def test_aligned_steps_leave_the_mean_of_a_completion_where_its_outcome_is() -> None:
    a, b, c, d = SCORES
    first, second = np.array([a, a, b, b]), np.array([c, d, d])
    part = np.concatenate([first - first.mean(), second - second.mean(), [0.0]])
    result = process("align", STEPS, lengths=[4, 4])
    np.testing.assert_allclose(result, np.array([2.0] * 4 + [-1.0] * 4) + 0.5 * part, rtol=1e-12)
    np.testing.assert_allclose([result[:4].mean(), result[4:].mean()], [2.0, -1.0], rtol=1e-12)


@pytest.mark.parametrize("kind", ["returns", "align"])
def test_completion_without_step_rewards_keeps_its_outcome(kind: str) -> None:
    result = process(kind, [0.3, 0.4, 0.9, NAN, NAN], lengths=[3, 2])
    np.testing.assert_array_equal(result[3:], [-1.0, -1.0])
    assert np.isfinite(result).all()


def test_reward_of_every_token_is_a_step_of_one_token() -> None:
    rewards = np.array([0.3, 0.4, 0.9])
    z = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    np.testing.assert_allclose(process("align", rewards.tolist(), lengths=[3]), 2.0 + 0.5 * (z - z.mean()), rtol=1e-12)


def test_step_that_ends_in_a_masked_token_is_left_out() -> None:
    result = process("returns", [0.2, 0.9, 0.5, 0.1], lengths=[2, 2], mask=[1, 0, 1, 1])
    values = np.array([0.2, 0.5, 0.1])
    a, b, c = (values - values.mean()) / (values.std() + 1e-6)
    np.testing.assert_allclose(result, [2 + a / 2, 2.0, -1 + (b + c) / 2, -1 + c / 2], rtol=1e-12)
