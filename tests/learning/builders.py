"""Groups and models for the tests of learning, small enough to check by hand.

Builds real carriers; the generator's logprobs come from a plain full forward pass, written here
without any of the trainer's code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.config import AlgorithmSettings, StalenessSettings, TrainerSettings
from pipeline.learner.policy import PolicyLearner
from pipeline.messages import (
    Completion,
    FinishReason,
    PromptGroup,
    RolloutGroup,
    RoutedExperts,
    SamplingMask,
    SamplingParams,
    Score,
    ScoredGroup,
    TopLogprobs,
    VersionSpan,
)
from pipeline.policy import Policy

VOCABULARY_SIZE = 13

ModelT = TypeVar("ModelT", bound=torch.nn.Module)


def tiny_llama(seed: int = 0, *, dtype: torch.dtype = torch.float64, **options: object) -> LlamaForCausalLM:
    """A one-layer Llama over 13 ids with sharp, uneven distributions."""
    settings = {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "initializer_range": 0.5,
        "pad_token_id": 0,
    } | options
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return exact_norms(LlamaForCausalLM(LlamaConfig(**settings)).to(dtype))


def exact_norms(model: ModelT) -> ModelT:
    """`model` with norms of its own precision: transformers' cast to float32, in which sums depend on their order."""
    for parent in list(model.modules()):
        for name, module in parent.named_children():
            if type(module).__name__ in {"LlamaRMSNorm", "Qwen3RMSNorm"}:
                norm = torch.nn.RMSNorm(module.weight.shape[0], eps=module.variance_epsilon).to(module.weight)
                norm.load_state_dict(module.state_dict())
                setattr(parent, name, norm)
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One completion to build: its ids, reward, and what differs from the usual."""

    token_ids: Sequence[int]
    reward: float | None = 0.0
    generator_logprobs: Sequence[float] | None = None
    spans: Sequence[tuple[int, int]] = ((0, 0),)
    loss_mask: Sequence[int] | None = None
    sampling_mask: SamplingMask | None = None
    routed_experts: RoutedExperts | None = None
    token_rewards: Sequence[float] | None = None
    teacher_logprobs: Sequence[float] | None = None
    teacher_top: tuple[TopLogprobs, ...] = ()


def make_group(
    rows: Sequence[Row],
    *,
    ordinal: int = 0,
    prompt: Sequence[int] = (1, 5, 3),
    temperature: float = 1.0,
    top_p: float = 1.0,
    is_evaluation: bool = False,
) -> ScoredGroup:
    """A scored group of `rows`; logprobs default to -1 everywhere."""
    prompt_group = PromptGroup(
        group_id=f"{ordinal:08d}",
        ordinal=ordinal,
        dataset_index=ordinal,
        epoch=0,
        prompt="",
        prompt_token_ids=np.array(prompt, dtype=np.uint32),
        columns={},
        sampling=SamplingParams(group_size=len(rows), max_tokens=64, temperature=temperature, top_p=top_p),
        fed_version=0,
        min_version=0,
        is_evaluation=is_evaluation,
    )
    rollout = RolloutGroup(prompt=prompt_group, completions=tuple(_completion(row) for row in rows), generator="g")
    return ScoredGroup(rollout=rollout, scores=tuple(_score(row) for row in rows), scorer="s")


def _score(row: Row) -> Score:
    tokens = None if row.token_rewards is None else np.array(row.token_rewards, dtype=np.float32)
    taught = None if row.teacher_logprobs is None else np.array(row.teacher_logprobs, dtype=np.float32)
    return Score(reward=row.reward, token_rewards=tokens, teacher_logprobs=taught, teacher_top=row.teacher_top)


def _completion(row: Row) -> Completion:
    length = len(row.token_ids)
    logprobs = [-1.0] * length if row.generator_logprobs is None else row.generator_logprobs
    return Completion(
        token_ids=np.array(row.token_ids, dtype=np.uint32),
        generator_logprobs=np.array(logprobs, dtype=np.float32),
        loss_mask=np.array([1] * length if row.loss_mask is None else row.loss_mask, dtype=np.uint8),
        spans=tuple(VersionSpan(weight_version=version, first_token=first) for version, first in row.spans),
        finish_reason=FinishReason.STOP,
        text="",
        sampling_mask=row.sampling_mask,
        routed_experts=row.routed_experts,
    )


def random_groups(
    model: LlamaForCausalLM,
    *,
    num_groups: int = 4,
    group_size: int = 4,
    seed: int = 0,
    temperature: float = 1.0,
    noise: float = 0.0,
) -> list[ScoredGroup]:
    """Groups of random ids of uneven length, with `model`'s logprobs plus `noise`, and random rewards."""
    random = np.random.default_rng(seed)
    groups = []
    for ordinal in range(num_groups):
        prompt = random.integers(1, VOCABULARY_SIZE, random.integers(1, 6)).tolist()
        rows = []
        for _ in range(group_size):
            ids = random.integers(1, VOCABULARY_SIZE, random.integers(1, 12)).tolist()
            logprobs = plain_logprobs(model, prompt, ids, temperature).detach().numpy()
            rows.append(
                Row(
                    token_ids=ids,
                    reward=float(random.integers(0, 3)),
                    generator_logprobs=(logprobs + noise * random.standard_normal(len(ids))).tolist(),
                )
            )
        groups.append(make_group(rows, ordinal=ordinal, prompt=prompt, temperature=temperature))
    return groups


def plain_logprobs(
    model: LlamaForCausalLM, prompt: Sequence[int], token_ids: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """log p of each completion token by one forward pass over prompt and completion, [T]."""
    ids = torch.tensor([[*prompt, *token_ids]])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature  # [T, V]
    return logits.log_softmax(-1)[torch.arange(len(token_ids)), torch.tensor(list(token_ids))]


def make_learner(
    model: LlamaForCausalLM,
    *,
    algorithm: AlgorithmSettings | None = None,
    trainer: dict[str, object] | None = None,
    staleness: StalenessSettings | None = None,
    reference: LlamaForCausalLM | None = None,
    reward_weights: Mapping[str, float] | None = None,
) -> PolicyLearner:
    """A learner around `model`; logits are made 5 tokens at a time."""
    settings = TrainerSettings.model_validate({"learning_rate": 1e-2, "logprob_chunk_tokens": 5} | (trainer or {}))
    return PolicyLearner(
        Policy(model, logprob_chunk_tokens=settings.logprob_chunk_tokens, reference=reference),
        algorithm=algorithm or AlgorithmSettings(),
        trainer=settings,
        staleness=staleness or StalenessSettings(),
        reward_weights=reward_weights,
    )


def with_mask_of(row: Row, kept: Sequence[Sequence[int]]) -> Row:
    """`row` with a sampling mask: for each token the ids that could be drawn."""
    flat = [token_id for ids in kept for token_id in ids]
    return replace(
        row,
        sampling_mask=SamplingMask(
            kept_ids=np.array(flat, dtype=np.uint32), num_kept=np.array([len(ids) for ids in kept], dtype=np.uint32)
        ),
    )


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the gradients that there are."""
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
