"""Groups become micro-batches under a token budget.

In: scored groups in feeding order and their assessments. Out: one `Sample` for each completion, and
padded tensors of at most `budget` tokens. Token ids are those that were generated, never text that
was tokenised again. The split is deterministic and must not matter to the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pipeline.errors import MessageError
from pipeline.filters import rewards_of
from pipeline.messages import Completion, PromptGroup, Score, ScoredGroup, TokenIds, expert_dtype
from pipeline.staleness import Ages, Assessment

BoolMask: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One completion as the trainer sees it.

    prompt_token_ids: [P]. mask: [T], tokens to train on. ages: [T], in weight versions.
    reward: None where not scored. score: what it was made of. max_tokens: limit of the completion.
    group_index: position of the group in the step.
    num_nonfinite: tokens left out for a generator logprob that is not finite.
    num_unreplayed: tokens to train on that were sampled by a truncated distribution whose mask is missing.
    """

    prompt_token_ids: TokenIds
    completion: Completion
    mask: BoolMask
    ages: Ages
    temperature: float
    reward: float | None
    score: Score
    max_tokens: int
    group_index: int
    num_nonfinite: int
    num_unreplayed: int

    @property
    def num_tokens(self) -> int:
        """Tokens to train on."""
        return int(self.mask.sum())

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt_token_ids) + len(self.completion)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptTokens:
    """Which ids could be drawn, row by row. ids: [K]. rows: [K], row of each id. is_limited: [M] bool,
    False where a row was not truncated and all ids count."""

    ids: Tensor
    rows: Tensor
    is_limited: Tensor

    def to(self, device: torch.device) -> KeptTokens:
        """The same on `device`."""
        return replace(self, **_tensors_on(self, device))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routing:
    """Experts that the generator's routers chose. experts: [B, L, layers, top_k]. is_recorded: [B, L] bool,
    False at padding, at the last token of a sequence and where nothing was recorded. num_experts: of a layer."""

    experts: Tensor
    is_recorded: Tensor
    num_experts: int

    def to(self, device: torch.device) -> Routing:
        """The same on `device`."""
        return replace(self, **_tensors_on(self, device))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """B completions, padded on the right: L token positions, T completion positions, M trained tokens.

    input_ids, attention_mask: [B, L]. mask: [B, T] bool, True at the M tokens to train on, which the
    flat tensors list row by row: state_index [M], position in [B * L] whose hidden state predicts the
    token; token_index [M], position in [B * T]; targets [M]; temperatures [M].
    generator_logprobs: [B, T] float32; advantages, factors: [B, T] float64; ages: [B, T] int64; 0 outside the mask.
    """

    input_ids: Tensor
    attention_mask: Tensor
    mask: Tensor
    state_index: Tensor
    token_index: Tensor
    targets: Tensor
    temperatures: Tensor
    generator_logprobs: Tensor
    advantages: Tensor
    factors: Tensor
    ages: Tensor
    kept: KeptTokens | None = None
    routing: Routing | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """The same on `device`."""
        kept = self.kept.to(device) if self.kept is not None else None
        routing = self.routing.to(device) if self.routing is not None else None
        return replace(self, **_tensors_on(self, device), kept=kept, routing=routing)


def make_samples(groups: Sequence[ScoredGroup], assessments: Sequence[Assessment]) -> list[Sample]:
    """One sample for each completion, in order. Raises MessageError for an empty prompt."""
    samples = []
    for group_index, (group, assessment) in enumerate(zip(groups, assessments, strict=True)):
        prompt = group.rollout.prompt
        _check(prompt)
        for completion, reward, score, kept, ages in zip(
            group.rollout.completions,
            rewards_of(group),
            group.scores,
            assessment.masks,
            assessment.token_ages,
            strict=True,
        ):
            is_wanted = (kept != 0) & (reward is not None)
            mask = is_wanted & np.isfinite(completion.generator_logprobs)
            has_gap = prompt.sampling.is_truncated and completion.sampling_mask is None
            samples.append(
                Sample(
                    prompt_token_ids=prompt.prompt_token_ids,
                    completion=completion,
                    mask=mask,
                    ages=ages,
                    temperature=prompt.sampling.temperature,
                    reward=reward,
                    score=score,
                    max_tokens=prompt.sampling.max_tokens,
                    group_index=group_index,
                    num_nonfinite=int(is_wanted.sum() - mask.sum()),
                    num_unreplayed=int(mask.sum()) if has_gap else 0,
                )
            )
    return samples


def split(samples: Sequence[Sample], budget: int) -> Iterator[list[int]]:
    """Indices of samples, longest first, in micro-batches of at most `budget` padded tokens.

    A sample with nothing to train on is left out; one that is longer than the budget is alone.
    """
    order = sorted(
        (index for index, sample in enumerate(samples) if sample.num_tokens),
        key=lambda index: (-samples[index].length, index),
    )
    start = 0
    while start < len(order):
        rows = max(1, budget // samples[order[start]].length)
        yield order[start : start + rows]
        start += rows


def pad(samples: Sequence[Sample], advantages: Sequence[Tensor], factors: Tensor) -> MicroBatch:
    """Tensors of one micro-batch. advantages: for each sample [T], or one number for all its tokens. factors: [B]."""
    masks = _stack([sample.mask for sample in samples])  # [B, T]
    rows, columns = masks.nonzero()  # [M], row by row
    starts = np.array([len(sample.prompt_token_ids) for sample in samples])
    sequences = [np.concatenate([sample.prompt_token_ids, sample.completion.token_ids]) for sample in samples]
    input_ids = _stack(sequences).astype(np.int64)  # [B, L]
    temperatures = np.array([sample.temperature for sample in samples])
    generator_logprobs = _stack([sample.completion.generator_logprobs for sample in samples])
    mask = torch.from_numpy(masks)
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        attention_mask=torch.from_numpy(_stack([np.ones(len(ids), dtype=np.int64) for ids in sequences])),
        mask=mask,
        state_index=torch.from_numpy(rows * input_ids.shape[1] + starts[rows] + columns - 1),
        token_index=torch.from_numpy(rows * masks.shape[1] + columns),
        targets=torch.from_numpy(input_ids[rows, starts[rows] + columns]),
        temperatures=torch.from_numpy(temperatures[rows]),
        generator_logprobs=torch.from_numpy(np.where(masks, generator_logprobs, 0.0)).float(),
        advantages=_pad_advantages(samples, advantages) * mask,
        factors=factors[:, None] * mask,
        ages=torch.from_numpy(np.where(masks, _stack([sample.ages for sample in samples]), 0)),
        kept=_kept_tokens(samples),
        routing=pad_routing([sample.completion for sample in samples], input_ids.shape[1]),
    )


def _check(prompt: PromptGroup) -> None:
    assert not prompt.is_evaluation, "evaluation groups are never trained on"
    assert prompt.sampling.temperature > 0, "a greedy completion has no probability to train on"
    if not len(prompt.prompt_token_ids):
        raise MessageError(f"group {prompt.group_id}: an empty prompt predicts no first token")


def _stack(rows: Sequence[npt.NDArray[np.generic]]) -> npt.NDArray[np.generic]:
    """Rows of different lengths, padded on the right with 0, [B, longest]."""
    stacked = np.zeros((len(rows), max(len(row) for row in rows)), dtype=rows[0].dtype)
    for index, row in enumerate(rows):
        stacked[index, : len(row)] = row
    return stacked


def _pad_advantages(samples: Sequence[Sample], advantages: Sequence[Tensor]) -> Tensor:
    """[B, T]."""
    rows = [values.expand(len(sample.mask)) for values, sample in zip(advantages, samples, strict=True)]
    return pad_sequence(rows, batch_first=True)


def _kept_tokens(samples: Sequence[Sample]) -> KeptTokens | None:
    """Sampling masks of the M trained tokens, or None when no sample has one."""
    if all(sample.completion.sampling_mask is None for sample in samples):
        return None
    ids, counts = [], []
    for sample in samples:
        sampling_mask = sample.completion.sampling_mask
        if sampling_mask is None:
            counts.append(np.zeros(sample.num_tokens, dtype=np.int64))
            continue
        num_kept = sampling_mask.num_kept.astype(np.int64)  # [T]
        ids.append(sampling_mask.kept_ids[np.repeat(sample.mask, num_kept)])
        counts.append(num_kept[sample.mask])
    num_kept = np.concatenate(counts)  # [M]
    return KeptTokens(
        ids=torch.from_numpy(np.concatenate(ids).astype(np.int64)),
        rows=torch.from_numpy(np.repeat(np.arange(len(num_kept)), num_kept)),
        is_limited=torch.from_numpy(num_kept > 0),
    )


def pad_routing(completions: Sequence[Completion], num_columns: int) -> Routing | None:
    """Recorded experts of B sequences of at most `num_columns` tokens; None when there are none.

    Raises MessageError where they are of unlike models.
    """
    records = [completion.routed_experts for completion in completions]
    kinds = {(record.ids.shape[1:], record.num_experts) for record in records if record is not None}
    if not kinds:
        return None
    if len(kinds) > 1:
        raise MessageError(f"routed experts of unlike models in one step: {sorted(kinds)}")
    (shape, num_experts) = kinds.pop()
    experts = np.zeros((len(records), num_columns, *shape), dtype=expert_dtype(num_experts))
    is_recorded = np.zeros((len(records), num_columns), dtype=bool)
    for row, record in enumerate(records):
        if record is not None:
            experts[row, : len(record.ids)] = record.ids
            is_recorded[row, : len(record.ids)] = True
    return Routing(
        experts=torch.from_numpy(experts), is_recorded=torch.from_numpy(is_recorded), num_experts=num_experts
    )


def _tensors_on(carrier: MicroBatch | KeptTokens | Routing, device: torch.device) -> dict[str, Any]:
    values = {field.name: getattr(carrier, field.name) for field in fields(carrier)}
    return {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
