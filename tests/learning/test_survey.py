"""What is decided over a whole step before it is split: a KL term in the reward, the limit of m2po, shaped lengths."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from pipeline.config import AlgorithmSettings
from pipeline.messages import ScoredGroup
from tests.learning.builders import (
    Row,
    gradients,
    make_group,
    make_learner,
    plain_logprobs,
    random_groups,
    tiny_llama,
)
from tests.learning.papers import Seen, seen, standard, truncated

BETA = 0.3


def references(groups: list[ScoredGroup], model: LlamaForCausalLM | None = None) -> list[Tensor]:
    """Logprobs of every completion by the reference, which is `tiny_llama(2)` unless another is given."""
    model, found = model or tiny_llama(2), []
    for group in groups:
        prompt = group.rollout.prompt
        for item in group.rollout.completions:
            ids = (prompt.prompt_token_ids.tolist(), item.token_ids.tolist())
            found.append(plain_logprobs(model, *ids, prompt.sampling.temperature).detach())
    return found


def leave_one_out(all_seen: list[Seen], outcomes: list[float]) -> list[Tensor]:
    advantages = []
    start = 0
    while start < len(all_seen):
        size = len(all_seen[start].rewards)
        group = np.array(outcomes[start : start + size])
        for place in range(size):
            value = group[place] - np.delete(group, place).mean()
            advantages.append(torch.full((len(all_seen[start + place].new),), value, dtype=torch.float64))
        start += size
    return advantages


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_divergence_in_the_reward_is_taken_off_before_the_baseline(estimator: str) -> None:
    """RLOO: r_i - beta sum_t k_t for whole completions, without a gradient through k."""
    model = tiny_llama(1)
    groups = random_groups(model, noise=0.2)
    settings = AlgorithmSettings(preset="rloo", kl_coef=BETA, kl_estimator=estimator)
    learner = make_learner(model, algorithm=settings, reference=tiny_llama(2))

    loss, metrics = learner.accumulate(groups, trainer_version=0)
    ours = gradients(model)
    model.zero_grad()
    all_seen = [replace(one, ages=one.ages * 0) for one in seen(model, groups)]
    outcomes, kls = [], []
    for one, reference in zip(all_seen, references(groups), strict=True):
        gap = one.new.detach() - reference
        k = {"k1": gap, "k2": gap**2 / 2, "k3": torch.exp(-gap) + gap - 1}[estimator]
        kls.append(k)
        outcomes.append(one.reward - BETA * float(k.sum()))
    pairs = zip(all_seen, leave_one_out(all_seen, outcomes), strict=True)
    expected = torch.stack([(truncated(one, 1.0) * a).sum() for one, a in pairs]).mean()
    expected.backward()

    assert loss.item() == pytest.approx(expected.item(), rel=1e-8)
    assert metrics["kl"] == pytest.approx(float(torch.cat(kls).mean()), rel=1e-8)
    for name, value in gradients(model).items():
        torch.testing.assert_close(ours[name], value, rtol=1e-6, atol=1e-9)


def test_reinforce_pp_sees_the_divergence_that_is_still_to_come() -> None:
    model = tiny_llama(1)
    groups = random_groups(model, noise=0.2)
    learner = make_learner(
        model, algorithm=AlgorithmSettings(preset="reinforce_pp", kl_coef=BETA), reference=tiny_llama(2)
    )

    loss, _ = learner.accumulate(groups, trainer_version=0)
    all_seen = seen(model, groups)
    returns = []
    for one, reference in zip(all_seen, references(groups), strict=True):
        k = (one.new.detach() - reference).numpy()
        returns.append(np.array([one.reward - BETA * k[t:].sum() for t in range(len(k))]))
    pooled = np.concatenate(returns)
    advantages = [(values - pooled.mean()) / (pooled.std() + 1e-6) for values in returns]
    rows = [truncated(one, 1.0) * torch.tensor(a) for one, a in zip(all_seen, advantages, strict=True)]

    assert loss.item() == pytest.approx(torch.cat(rows).mean().item(), rel=1e-8)


def test_m2po_masks_over_the_whole_step() -> None:
    """Greedy over all tokens of the batch, in the loss of the preset."""
    model = tiny_llama(1)
    groups = random_groups(model, noise=0.5)
    settings = AlgorithmSettings(preset="grpo", correction="m2po", clip_low=1.0, clip_high=100.0, m2po_max=0.1)
    learner = make_learner(model, algorithm=settings, trainer={"micro_batch_tokens": 30})

    loss, metrics = learner.accumulate(groups, trainer_version=0)
    all_seen = seen(model, groups)
    logs = np.concatenate([(one.new - one.old).detach().numpy() for one in all_seen])
    advantages = np.concatenate([np.full(len(one.new), standard(one)) for one in all_seen])
    is_kept = np.ones(len(logs), dtype=bool)
    for index in sorted(np.flatnonzero(advantages * logs > 0), key=lambda i: -abs(logs[i])):
        if np.mean(logs[is_kept] ** 2) <= 0.1:
            break
        is_kept[index] = False
    expected = np.mean(-np.exp(logs) * advantages * is_kept)

    assert loss.item() == pytest.approx(expected, rel=1e-8)
    assert metrics["masked_fraction"] == pytest.approx(1 - is_kept.mean())
    assert 0.05 < metrics["masked_fraction"] < 0.5


def test_reference_that_is_not_finite_neither_penalises_nor_trains_its_tokens() -> None:
    """L3: after one id the reference knows no numbers any more; all other tokens are trained as if it did."""
    model, reference = tiny_llama(1), tiny_llama(2)
    with torch.no_grad():
        reference.model.embed_tokens.weight[12] = torch.nan
    groups = random_groups(model, noise=0.2)
    num_faulty = sum(int((~torch.isfinite(values)).sum()) for values in references(groups, reference))
    num_after_it = sum(
        np.logical_or.accumulate(np.array([*group.rollout.prompt.prompt_token_ids, *item.token_ids]) == 12)[
            len(group.rollout.prompt.prompt_token_ids) - 1 : -1
        ].sum()
        for group in groups
        for item in group.rollout.completions
    )
    learner = make_learner(model, algorithm=AlgorithmSettings(preset="rloo", kl_coef=BETA), reference=reference)

    loss, metrics = learner.accumulate(groups, trainer_version=0)

    assert math.isfinite(loss.item())
    # Kernels spoil what comes before the id in its completion too, unless it is in another part of the row.
    assert 0 < num_after_it <= metrics["nonfinite_tokens"] <= num_faulty
    assert math.isfinite(metrics["kl"])
    assert all(torch.isfinite(value).all() for value in gradients(model).values())


def test_completions_near_the_limit_lose_reward() -> None:
    """DAPO: of 64 tokens the last 12.8 cost, up to 1 at the end; the mean over the group comes after that."""
    model = tiny_llama()
    lengths, rewards = [10, 50, 58, 64], [1.0, 1.0, 0.0, 1.0]
    rows = [
        Row(
            token_ids=[4] * length,
            reward=reward,
            generator_logprobs=plain_logprobs(model, [1, 5, 3], [4] * length).tolist(),
        )
        for length, reward in zip(lengths, rewards, strict=True)
    ]
    shaped = np.array(rewards) - np.clip((np.array(lengths) - 51.2) / 12.8, 0, 1)
    advantages = (shaped - shaped.mean()) / (shaped.std() + 1e-6)

    loss, metrics = make_learner(model, algorithm=AlgorithmSettings(preset="dapo")).accumulate(
        [make_group(rows)], trainer_version=0
    )

    assert loss.item() == pytest.approx(-(advantages * lengths).sum() / sum(lengths), rel=1e-5)
    assert metrics["overlong_completions"] == 2
    assert metrics["reward_mean"] == 0.75


def test_shaping_has_a_buffer_and_a_price_of_its_own_and_can_be_off() -> None:
    model = tiny_llama()
    rows = [Row(token_ids=[4] * 48, reward=1.0), Row(token_ids=[4] * 8, reward=1.0)]
    results = {}
    for name, changes in {
        "half": {"overlong": True, "overlong_buffer": 0.5, "overlong_penalty": 2.0},
        "off": {"overlong": False},
    }.items():
        settings = AlgorithmSettings.model_validate({"preset": "dapo", "advantage": "group_mean", **changes})
        _, metrics = make_learner(model, algorithm=settings).accumulate([make_group(rows)], trainer_version=0)
        results[name] = metrics["advantage_abs_mean"]
    assert results == {"half": pytest.approx(0.5), "off": 0.0}
