"""What the papers of the presets say, one completion at a time in float64.

Shares no code with the trainer: logprobs come from a plain forward pass, and the formulas are
written here once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from pipeline.messages import ScoredGroup
from tests.learning.builders import Row, make_group, plain_logprobs, random_groups

MAX_TOKENS = 64
VERSION = 3


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
    return clipped(ratio, advantage, 0.03, 0.04).expand(len(one.new))


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
    assert all(len(one.new) <= 0.8 * MAX_TOKENS for one in all_seen), "so long that DAPO would shape its reward"
    rows = [token_loss(one, a) for one, a in zip(all_seen, advantages(preset, all_seen), strict=True)]
    return aggregated(preset, rows)


def aggregated(preset: str, rows: list[Tensor]) -> Tensor:
    """Losses of the tokens of every completion as one number."""
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
