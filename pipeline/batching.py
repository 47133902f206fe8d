"""The tensors of a micro-batch.

In: samples that go through the model together. Out: their tokens, in padded rows or all in one, and
what the loss must know of each completion, which is the same in every layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pipeline.errors import MessageError
from pipeline.messages import Completion, expert_dtype
from pipeline.packing import Ints, Layout, Segments, pack_row, split
from pipeline.samples import BoolMask, Sample, make_samples

__all__ = [
    "KeptTokens",
    "Layout",
    "MicroBatch",
    "Routing",
    "Sample",
    "Segments",
    "TeacherTop",
    "arrange",
    "kept_tokens",
    "make_samples",
    "pack",
    "pad",
    "pad_routing",
    "split",
]


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
    """Experts that the generator's routers chose. experts: [R, L, layers, top_k]. is_recorded: [R, L] bool,
    False at padding, at the last token of a sequence and where nothing was recorded. num_experts: of a layer."""

    experts: Tensor
    is_recorded: Tensor
    num_experts: int

    def to(self, device: torch.device) -> Routing:
        """The same on `device`."""
        return replace(self, **_tensors_on(self, device))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TeacherTop:
    """What up to J teachers find likeliest at M tokens. token_ids: [M, J, k]. logprobs: [M, J, k], -inf where there
    is none. weights: [M, J], 0 where nothing was said."""

    token_ids: Tensor
    logprobs: Tensor
    weights: Tensor

    def to(self, device: torch.device) -> TeacherTop:
        """The same on `device`."""
        return replace(self, **_tensors_on(self, device))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """B completions in R rows of L token places: T completion positions, M trained tokens.

    input_ids: [R, L]. Padded on the right, R is B and attention_mask [B, L] says which places hold
    tokens. Packed, R is 1 and there is no padding: position_ids [1, L], and segments say what attends to what.
    mask: [B, T] bool, True at the M tokens to train on, which the flat tensors list row by row:
    state_index [M], place in [R * L] whose hidden state predicts the token; token_index [M], position
    in [B * T]; targets [M]; temperatures [M].
    generator_logprobs: [B, T] float32; advantages, factors: [B, T] float64; ages: [B, T] int64; 0 outside the mask.
    teacher_logprobs: [B, T] float32, NaN where no teacher has said anything; None where none has anywhere.
    teacher_top: of the M trained tokens; None where no teacher was asked for more than the sampled ones.
    """

    input_ids: Tensor
    mask: Tensor
    state_index: Tensor
    token_index: Tensor
    targets: Tensor
    temperatures: Tensor
    generator_logprobs: Tensor
    advantages: Tensor
    factors: Tensor
    ages: Tensor
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None
    segments: Segments | None = None
    kept: KeptTokens | None = None
    routing: Routing | None = None
    teacher_logprobs: Tensor | None = None
    teacher_top: TeacherTop | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """The same on `device`."""
        kept = self.kept.to(device) if self.kept is not None else None
        routing = self.routing.to(device) if self.routing is not None else None
        top = self.teacher_top.to(device) if self.teacher_top is not None else None
        return replace(self, **_tensors_on(self, device), kept=kept, routing=routing, teacher_top=top)

    def scatter(self, values: Tensor) -> Tensor:
        """Values of the M trained tokens at their places, [B, T], 0 elsewhere."""
        flat = values.new_zeros(self.mask.numel())
        return flat.index_put((self.token_index,), values).view(self.mask.shape)


def pad(samples: Sequence[Sample], advantages: Sequence[Tensor], factors: Tensor) -> MicroBatch:
    """One padded row for each sample. See `arrange`."""
    completions = [sample.completion for sample in samples]
    sequences = [np.concatenate([sample.prompt_token_ids, sample.completion.token_ids]) for sample in samples]
    input_ids = _stack(sequences).astype(np.int64)  # [B, L]
    starts = np.array([len(sample.prompt_token_ids) for sample in samples])
    places = np.arange(len(samples)) * input_ids.shape[1] + starts - 1  # [B], of the last token of each prompt
    rows, columns = _trained_tokens(samples)
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        attention_mask=torch.from_numpy(_stack([np.ones(len(ids), dtype=np.int64) for ids in sequences])),
        state_index=torch.from_numpy(places[rows] + columns),
        routing=pad_routing(completions, input_ids.shape[1]),
        **_of_completions(samples, advantages, factors),
    )


def pack(samples: Sequence[Sample], advantages: Sequence[Tensor], factors: Tensor, layout: Layout) -> MicroBatch:
    """All samples in one row. See `arrange`."""
    row = pack_row(samples, layout)
    positions = row.segments.positions
    return MicroBatch(
        input_ids=torch.from_numpy(row.token_ids[None]),
        position_ids=torch.from_numpy(positions[None]),
        segments=row.segments,
        state_index=torch.from_numpy(row.state_places(*_trained_tokens(samples))),
        routing=_pack_routing([sample.completion for sample in samples], row.owners, positions),
        **_of_completions(samples, advantages, factors),
    )


def arrange(samples: Sequence[Sample], advantages: Sequence[Tensor], factors: Tensor, layout: Layout) -> MicroBatch:
    """Tensors of one micro-batch. advantages: for each sample [T], or one number for all its tokens. factors: [B]."""
    if layout is Layout.PADDED:
        return pad(samples, advantages, factors)
    return pack(samples, advantages, factors, layout)


def _trained_tokens(samples: Sequence[Sample]) -> tuple[Ints, Ints]:
    """Row and column [M] of every token to train on, row by row."""
    rows, columns = _stack([sample.mask for sample in samples]).nonzero()
    return rows, columns


def _of_completions(samples: Sequence[Sample], advantages: Sequence[Tensor], factors: Tensor) -> dict[str, Any]:
    """What a micro-batch says of completions and trained tokens, however they go through the model."""
    masks = _stack([sample.mask for sample in samples])  # [B, T]
    rows, columns = _trained_tokens(samples)
    token_ids = _stack([sample.completion.token_ids for sample in samples]).astype(np.int64)  # [B, T]
    temperatures = np.array([sample.temperature for sample in samples])
    generator_logprobs = _stack([sample.completion.generator_logprobs for sample in samples])
    mask = torch.from_numpy(masks)
    return {
        "mask": mask,
        "token_index": torch.from_numpy(rows * masks.shape[1] + columns),
        "targets": torch.from_numpy(token_ids[rows, columns]),
        "temperatures": torch.from_numpy(temperatures[rows]),
        "generator_logprobs": torch.from_numpy(np.where(masks, generator_logprobs, 0.0)).float(),
        "advantages": _pad_advantages(samples, advantages) * mask,
        "factors": factors[:, None] * mask,
        "ages": torch.from_numpy(np.where(masks, _stack([sample.ages for sample in samples]), 0)),
        "kept": kept_tokens([(sample.completion, sample.mask) for sample in samples]),
        "teacher_logprobs": _teacher_logprobs(samples),
        "teacher_top": _teacher_top(samples),
    }


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


def _teacher_logprobs(samples: Sequence[Sample]) -> Tensor | None:
    if all(sample.score.teacher_logprobs is None for sample in samples):
        return None
    rows = [sample.teacher_logprobs for sample in samples]
    return pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True, padding_value=torch.nan)


def _teacher_top(samples: Sequence[Sample]) -> TeacherTop | None:
    tops = [sample.score.teacher_top for sample in samples]
    if not any(tops):
        return None
    most, widest = max(map(len, tops)), max(top.token_ids.shape[1] for items in tops for top in items)
    num_tokens = sum(sample.num_tokens for sample in samples)
    token_ids = np.zeros((num_tokens, most, widest), dtype=np.int64)
    logprobs = np.full((num_tokens, most, widest), -np.inf, dtype=np.float32)
    weights = np.zeros((num_tokens, most), dtype=np.float32)
    start = 0
    for sample, items in zip(samples, tops, strict=True):
        rows = slice(start, start := start + sample.num_tokens)
        for place, top in enumerate(items):
            columns = slice(top.token_ids.shape[1])
            token_ids[rows, place, columns] = top.token_ids[sample.mask]
            logprobs[rows, place, columns] = top.logprobs[sample.mask]
            weights[rows, place] = top.weight
    return TeacherTop(
        token_ids=torch.from_numpy(token_ids), logprobs=torch.from_numpy(logprobs), weights=torch.from_numpy(weights)
    )


def kept_tokens(chosen: Sequence[tuple[Completion, BoolMask]]) -> KeptTokens | None:
    """Sampling masks of the M tokens that are chosen in completions, or None when no completion has one."""
    if all(completion.sampling_mask is None for completion, _ in chosen):
        return None
    ids, counts = [], []
    for completion, mask in chosen:
        sampling_mask = completion.sampling_mask
        if sampling_mask is None:
            counts.append(np.zeros(int(mask.sum()), dtype=np.int64))
            continue
        num_kept = sampling_mask.num_kept.astype(np.int64)  # [T]
        ids.append(sampling_mask.kept_ids[np.repeat(mask, num_kept)])
        counts.append(num_kept[mask])
    num_kept = np.concatenate(counts)  # [M]
    return KeptTokens(
        ids=torch.from_numpy(np.concatenate(ids).astype(np.int64)),
        rows=torch.from_numpy(np.repeat(np.arange(len(num_kept)), num_kept)),
        is_limited=torch.from_numpy(num_kept > 0),
    )


def pad_routing(completions: Sequence[Completion], num_columns: int) -> Routing | None:
    """Recorded experts of the first `num_columns` tokens of B sequences; None when there are none.

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
            ids = record.ids[:num_columns]
            experts[row, : len(ids)] = ids
            is_recorded[row, : len(ids)] = True
    return Routing(
        experts=torch.from_numpy(experts), is_recorded=torch.from_numpy(is_recorded), num_experts=num_experts
    )


def _pack_routing(completions: Sequence[Completion], owners: Ints, positions: Ints) -> Routing | None:
    """Recorded experts of the N tokens of a row, or None. owners, positions: [N], completion and place in it."""
    padded = pad_routing(completions, int(positions.max()) + 1)
    if padded is None:
        return None
    rows, columns = torch.from_numpy(owners), torch.from_numpy(positions)
    return replace(
        padded, experts=padded.experts[rows, columns][None], is_recorded=padded.is_recorded[rows, columns][None]
    )


def _tensors_on(carrier: MicroBatch | KeptTokens | Routing | TeacherTop, device: torch.device) -> dict[str, Any]:
    values = {field.name: getattr(carrier, field.name) for field in fields(carrier)}
    return {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
