"""Every preset as a whole: its loss and gradient against the paper's formula, and what must not matter (L1-L6).

The formulas are written here, one completion at a time in float64, and share no code with the trainer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from pipeline.config import AlgorithmSettings, StalenessSettings
from pipeline.config.presets import PRESETS
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
from tests.learning.nucleus import nucleus_group

MAX_TOKENS = 64
VERSION = 3
KEEP_ALL = StalenessSettings(max_staleness=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One completion as a formula sees it: logprobs [T], token ages [T], its group's rewards and its place there."""

    new: Tensor
    old: Tensor
    ages: Tensor
    rewards: np.ndarray
    place: int

    @property
    def reward(self) -> float:
        return float(self.rewards[self.place])


def seen(model: LlamaForCausalLM, groups: list[ScoredGroup]) -> list[Seen]:
    completions = []
    for group in groups:
        prompt = group.rollout.prompt
        rewards = np.array([score.reward for score in group.scores])
        for place, item in enumerate(group.rollout.completions):
            arguments = (prompt.prompt_token_ids.tolist(), item.token_ids.tolist(), prompt.sampling.temperature)
            completions.append(
                Seen(
                    new=plain_logprobs(model, *arguments),
                    old=torch.tensor(item.generator_logprobs.astype(np.float64)),
                    ages=torch.tensor(VERSION - item.token_versions),
                    rewards=rewards,
                    place=place,
                )
            )
    return completions


def standard(one: Seen) -> float:
    spread = one.rewards.std()
    return (one.reward - one.rewards.mean()) / (spread + 1e-6) if spread > 0 else 0.0


def overlong(one: Seen) -> Seen:
    """DAPO: past four fifths of the limit a completion loses up to 1. None here is that long."""
    assert len(one.new) <= 0.8 * MAX_TOKENS
    return one


def of_batch(values: list[float], lengths: list[int]) -> list[float]:
    tokens = np.repeat(values, lengths)
    return [(value - tokens.mean()) / (tokens.std() + 1e-6) for value in values]


def advantages(preset: str, all_seen: list[Seen]) -> list[float]:
    lengths = [len(one.new) for one in all_seen]
    match preset:
        case "dr_grpo" | "topr":
            return [one.reward - one.rewards.mean() for one in all_seen]
        case "rloo":
            return [one.reward - np.delete(one.rewards, one.place).mean() for one in all_seen]
        case "maxrl":
            means = [one.rewards.mean() for one in all_seen]
            return [(one.reward - mean) / mean if mean > 0 else 0.0 for one, mean in zip(all_seen, means, strict=True)]
        case "reinforce_pp":
            return of_batch([one.reward for one in all_seen], lengths)
        case "reinforce_pp_baseline":
            return of_batch([one.reward - one.rewards.mean() for one in all_seen], lengths)
        case _:
            return [standard(one) for one in all_seen]


def clipped(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    return -torch.min(ratio * advantage, ratio.clip(1 - low, 1 + high) * advantage)


def truncated(one: Seen, advantage: float) -> Tensor:
    weight = torch.exp(one.new.detach() - one.old).clip(max=2.0)
    return -weight * advantage * torch.exp(one.new - one.new.detach())


def decoupled(one: Seen, advantage: float) -> Tensor:
    now = one.new.detach()
    shares = torch.where(one.ages > 0, 1 / one.ages.clip(min=1), 0.0)
    prox = shares * one.old + (1 - shares) * now
    return torch.exp(prox - one.old).clip(max=2.0) * clipped(torch.exp(one.new - prox), advantage, 0.2, 0.28)


def gspo(one: Seen, advantage: float) -> Tensor:
    ratio = torch.exp((one.new - one.old).mean())
    return clipped(ratio, advantage, 3e-4, 4e-4).expand(len(one.new))


def gmpo(one: Seen, advantage: float) -> Tensor:
    sign = math.copysign(1.0, advantage)
    logs = sign * torch.min(sign * (one.new - one.old), sign * (one.new - one.old).clip(-0.4, 0.4))
    return (-advantage * torch.exp(logs.mean())).expand(len(one.new))


def sapo(one: Seen, advantage: float) -> Tensor:
    tau = 1.0 if advantage > 0 else 1.05
    return -advantage * 4 / tau * torch.sigmoid(tau * (torch.exp(one.new - one.old) - 1))


def cispo(one: Seen, advantage: float) -> Tensor:
    return -torch.exp(one.new.detach() - one.old).clip(max=5.0) * advantage * one.new


def topr(one: Seen, advantage: float) -> Tensor:
    ratio = torch.exp((one.new.detach() - one.old).sum()).clip(max=1.0)
    return -(ratio if advantage < 0 else 1.0) * advantage * one.new


def dppo(one: Seen, advantage: float) -> Tensor:
    gap = one.new.detach().exp() - one.old.exp()
    return torch.where((advantage * gap > 0) & (gap.abs() > 0.15), 0.0, -torch.exp(one.new - one.old) * advantage)


TOKEN_LOSSES: dict[str, Callable[[Seen, float], Tensor]] = {
    "dapo": lambda one, advantage: clipped(torch.exp(one.new - one.old), advantage, 0.2, 0.28),
    "decoupled_ppo": decoupled,
    "gspo": gspo,
    "gmpo": gmpo,
    "sapo": sapo,
    "cispo": cispo,
    "topr": topr,
    "dppo": dppo,
}


def paper_loss(preset: str, all_seen: list[Seen]) -> Tensor:
    token_loss = TOKEN_LOSSES.get(preset, truncated)
    rows = [token_loss(one, a) for one, a in zip(all_seen, advantages(preset, all_seen), strict=True)]
    match preset:
        case "dr_grpo":
            return torch.stack([row.sum() / MAX_TOKENS for row in rows]).mean()
        case "rloo" | "topr":
            return torch.stack([row.sum() for row in rows]).mean()
        case "gspo" | "gmpo" | "sapo":
            return torch.stack([row.mean() for row in rows]).mean()
        case _:
            return torch.cat(rows).mean()


def aged(groups: list[ScoredGroup], seed: int = 0) -> list[ScoredGroup]:
    """The groups as if weights had changed in the middle of their completions."""
    random = np.random.default_rng(seed)
    result = []
    for group in groups:
        rows = [
            Row(
                token_ids=item.token_ids.tolist(),
                reward=score.reward,
                generator_logprobs=item.generator_logprobs.tolist(),
                spans=_spans(len(item), random),
            )
            for item, score in zip(group.rollout.completions, group.scores, strict=True)
        ]
        prompt = group.rollout.prompt
        result.append(
            make_group(
                rows,
                ordinal=prompt.ordinal,
                prompt=prompt.prompt_token_ids.tolist(),
                temperature=prompt.sampling.temperature,
            )
        )
    return result


def _spans(length: int, random: np.random.Generator) -> list[tuple[int, int]]:
    starts = sorted({0, *random.integers(0, length, 2).tolist()})
    versions = sorted(random.choice(VERSION + 1, len(starts), replace=False).tolist())
    return list(zip(versions, starts, strict=True))


def groups_of(model: LlamaForCausalLM, *, noise: float = 0.3) -> list[ScoredGroup]:
    return aged(random_groups(model, temperature=0.8, noise=noise))


each_preset = pytest.mark.parametrize("preset", sorted(PRESETS))


@each_preset
def test_loss_and_gradient_agree_with_the_paper(preset: str) -> None:
    model = tiny_llama(1)
    groups = groups_of(model)
    learner = make_learner(model, algorithm=AlgorithmSettings(preset=preset), staleness=KEEP_ALL)

    loss, metrics = learner.accumulate(groups, trainer_version=VERSION)
    ours = gradients(model)
    model.zero_grad()
    expected = paper_loss(preset, [overlong(one) for one in seen(model, groups)])
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
    match preset:
        case "dr_grpo":
            plain = torch.stack([row.sum() / MAX_TOKENS for row in rows]).mean()
        case "rloo" | "topr":
            plain = torch.stack([row.sum() for row in rows]).mean()
        case "gspo" | "gmpo" | "sapo":
            plain = torch.stack([row.mean() for row in rows]).mean()
        case _:
            plain = torch.cat(rows).mean()
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
