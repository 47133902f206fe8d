"""Completions become one row of tokens without padding, in which a group has its prompt once.

In: samples. Out: which of them go through the model together, the row of their tokens, and what in
it attends to what. Splits and rows are deterministic, and neither must matter to the loss.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pipeline.samples import Sample

Ints: TypeAlias = npt.NDArray[np.int64]

# Keys and values of a shared prompt are laid beside those of each completion, and kept for the backward
# pass: about an eighth of the memory that the whole token would take.
_SHARED_KEY_COST = 8

# A prompt is shared if it has at least this share of the tokens of its longest completion: what a shorter
# one would save, attention in two kinds of blocks costs. What holds for a group holds for any part of it.
_LEAST_SHARE = 1 / 8


class Layout(StrEnum):
    """How completions go through the model: a padded row each; one row for all; that, with each prompt once."""

    PADDED = "padded"
    PACKED = "packed"
    SHARED = "shared"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segments:
    """What attends to what in a row: S segments fill it one after the other, and see themselves, causally.

    lengths: [S], in tokens. prefix_starts, prefix_lengths: [S], a stretch of the row that all of the
    segment sees too, as if it stood before it; where its length is 0 there is none.
    """

    lengths: Ints
    prefix_starts: Ints
    prefix_lengths: Ints

    @property
    def starts(self) -> Ints:
        """[S], where they begin in the row."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def positions(self) -> Ints:
        """[N], position of every token in its sequence."""
        num_tokens = int(self.lengths.sum())
        return np.arange(num_tokens) + np.repeat(self.prefix_lengths - self.starts, self.lengths)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedRow:
    """B samples in N tokens. token_ids: [N]. owners: [N], a sample that has the token.

    prompt_ends: [B], place of the last token of the prompt; completion_starts: [B], of the first of
    the completion, whether or not it must be read.
    """

    token_ids: Ints
    owners: Ints
    segments: Segments
    prompt_ends: Ints
    completion_starts: Ints

    def state_places(self, rows: Ints, columns: Ints) -> Ints:
        """[M], the place whose state predicts token `columns` of completion `rows`."""
        return np.where(columns == 0, self.prompt_ends[rows], self.completion_starts[rows] + columns - 1)


def pack_row(samples: Sequence[Sample], layout: Layout) -> PackedRow:
    """The row of a micro-batch. What no trained token depends on is not in it."""
    pieces: list[tuple[int, npt.NDArray[np.uint32], int, int]] = []  # owner, ids, start and length of the prefix
    prompt_ends = np.zeros(len(samples), dtype=np.int64)
    completion_starts = np.zeros(len(samples), dtype=np.int64)
    place = 0
    for members in _clusters(samples, layout):
        prompt = samples[members[0]].prompt_token_ids
        prompt_ends[members] = place + len(prompt) - 1
        prefix = (place, len(prompt))
        if len(members) > 1:
            pieces.append((members[0], prompt, 0, 0))
            place += len(prompt)
        for row in members:
            ids = samples[row].completion.token_ids[: samples[row].num_read]
            completion_starts[row] = place if len(members) > 1 else place + len(prompt)
            piece = (row, ids, *prefix) if len(members) > 1 else (row, np.concatenate([prompt, ids]), 0, 0)
            if len(piece[1]):
                pieces.append(piece)
                place += len(piece[1])
    lengths = np.array([len(ids) for _, ids, _, _ in pieces])
    return PackedRow(
        token_ids=np.concatenate([ids for _, ids, _, _ in pieces]).astype(np.int64),
        owners=np.repeat([owner for owner, _, _, _ in pieces], lengths),
        segments=Segments(
            lengths=lengths,
            prefix_starts=np.array([start for _, _, start, _ in pieces]),
            prefix_lengths=np.array([length for _, _, _, length in pieces]),
        ),
        prompt_ends=prompt_ends,
        completion_starts=completion_starts,
    )


def split(samples: Sequence[Sample], budget: int, layout: Layout = Layout.PADDED) -> Iterator[list[int]]:
    """Indices of samples in micro-batches of at most `budget` tokens, padding included.

    A sample with nothing to train on is left out; one that is longer than the budget is alone. What
    shares a prompt stays together as far as the budget allows.
    """
    if layout is Layout.PADDED:
        yield from _split_padded(samples, budget)
        return
    wanted = [index for index, sample in enumerate(samples) if sample.num_tokens]
    chunks = []
    for members in _clusters([samples[index] for index in wanted], layout):
        chunks += _chunks(samples, [wanted[member] for member in members], budget)
    # The largest first, each into the first micro-batch that has room for it.
    rooms: list[int] = []
    batches: list[list[int]] = []
    for cost, chunk in sorted(chunks, key=lambda item: (-item[0], item[1])):
        place = next((place for place, room in enumerate(rooms) if room >= cost), len(rooms))
        if place == len(rooms):
            rooms.append(budget)
            batches.append([])
        rooms[place] -= cost
        batches[place] += chunk
    yield from batches


def describe_layout(samples: Sequence[Sample], batches: Sequence[Sequence[int]], layout: Layout) -> dict[str, float]:
    """Tokens that go through the model in a step, how many of them are padding, and what sharing prompts saved."""
    chosen = [[samples[row] for row in rows] for rows in batches]
    if layout is Layout.PADDED:
        num_tokens = sum(sample.length for batch in chosen for sample in batch)
        num_places = sum(len(batch) * max(sample.length for sample in batch) for batch in chosen)
        return {
            "forward_tokens": float(num_places),
            "padding_tokens": float(num_places - num_tokens),
            "shared_prompt_tokens": 0.0,
        }
    num_alone = num_packed = 0
    for batch in chosen:
        num_alone += sum(len(sample.prompt_token_ids) + sample.num_read for sample in batch)
        num_packed += _num_packed(batch, layout)
    return {
        "forward_tokens": float(num_packed),
        "padding_tokens": 0.0,
        "shared_prompt_tokens": float(num_alone - num_packed),
    }


def _num_packed(samples: Sequence[Sample], layout: Layout) -> int:
    """Tokens of their row."""
    prompts = sum(len(samples[members[0]].prompt_token_ids) for members in _clusters(samples, layout))
    return prompts + sum(sample.num_read for sample in samples)


def _split_padded(samples: Sequence[Sample], budget: int) -> Iterator[list[int]]:
    wanted = [index for index, sample in enumerate(samples) if sample.num_tokens]
    for rows in padded_batches([samples[index].length for index in wanted], budget):
        yield [wanted[row] for row in rows]


def padded_batches(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Indices in batches of at most `budget` tokens, padding included, each of one row at least.

    Longest first, so that rows of one batch have about one length.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    start = 0
    while start < len(order):
        rows = max(1, budget // max(1, lengths[order[start]]))
        yield order[start : start + rows]
        start += rows


def _chunks(samples: Sequence[Sample], members: Sequence[int], budget: int) -> list[tuple[int, list[int]]]:
    """Cost and indices of what is left together of samples that share a prompt, longest first."""
    num_prompt = len(samples[members[0]].prompt_token_ids)
    per_member = num_prompt // _SHARED_KEY_COST if len(members) > 1 else 0
    chunks: list[tuple[int, list[int]]] = []
    for index in sorted(members, key=lambda index: (-samples[index].num_read, index)):
        cost = samples[index].num_read + per_member
        if chunks and chunks[-1][0] + cost <= budget:
            chunks[-1] = (chunks[-1][0] + cost, [*chunks[-1][1], index])
            continue
        chunks.append((num_prompt + cost, [index]))
    return chunks


def _clusters(samples: Sequence[Sample], layout: Layout) -> list[list[int]]:
    """Indices of samples that share their prompt, in order; those that share none are alone."""
    if layout is not Layout.SHARED:
        return [[index] for index in range(len(samples))]
    found: dict[Hashable, list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        found[_prompt_key(sample)].append(index)
    clusters = []
    for members in found.values():
        num_prompt = len(samples[members[0]].prompt_token_ids)
        longest = max(samples[index].num_read for index in members)
        if num_prompt >= _LEAST_SHARE * longest:
            clusters.append(members)
        else:
            clusters += [[index] for index in members]
    return clusters


def _prompt_key(sample: Sample) -> Hashable:
    """Equal where the prompt goes through the model in the same way: also to the same experts, where those are kept."""
    routed = sample.completion.routed_experts
    num_prompt = len(sample.prompt_token_ids)
    return sample.group_index, None if routed is None else routed.ids[:num_prompt].tobytes()
