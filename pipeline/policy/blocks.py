"""Segments of a packed row as a few rectangles, which attention kernels take at once.

In: segments. Out: blocks of segments of about one size, each padded to its largest, so that only
attention itself meets padding; and cumulative lengths for kernels that need none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.batching import Segments

# A call costs as much as so many pairs of query and key; and padding may be this share of a block.
_CALL_PAIRS = 4096
_MOST_PADDING = 0.25

# Segments are in one block if the longer has at most so many times the queries of the other.
_CLASS_RATIO = 1.5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """S segments of at most Q queries and K keys. queries: [S, Q], keys: [S, K], places in the row.

    query_positions, key_positions: [S, Q], [S, K] in the sequence; [1, ...] where all are alike. A key
    before position 0 is none. is_square: keys are the queries, so that causality alone hides what is padded.
    """

    queries: Tensor
    keys: Tensor
    query_positions: Tensor
    key_positions: Tensor
    is_square: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocks:
    """order: [N], place of each token of the row among the queries of all blocks. longest: keys of a segment."""

    blocks: tuple[Block, ...]
    order: Tensor
    longest: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flat:
    """The same for a kernel of variable lengths. query_bounds, key_bounds: [S + 1] int32, where segments
    begin and end; keys: [sum of keys], places in the row. most_queries, most_keys: of a segment."""

    query_bounds: Tensor
    key_bounds: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int


def make_blocks(segments: Segments, device: torch.device) -> Blocks:
    """Blocks of all segments, on `device`."""
    order = np.empty(int(segments.lengths.sum()), dtype=np.int64)
    blocks, num_queries = [], 0
    for members in _divide(segments):
        block, places = _block(segments, members)
        is_real = np.arange(places.shape[1]) < segments.lengths[members, None]
        order[places[is_real]] = num_queries + np.flatnonzero(is_real)
        num_queries += places.size
        blocks.append(_on(block, device))
    longest = int((segments.lengths + segments.prefix_lengths).max())
    return Blocks(blocks=tuple(blocks), order=torch.from_numpy(order).to(device), longest=longest)


def flatten(segments: Segments, device: torch.device) -> Flat:
    """Bounds of all segments, on `device`."""
    num_keys = segments.lengths + segments.prefix_lengths
    keys = [
        place
        for start, length, prefix, num_prefix in zip(
            segments.starts, segments.lengths, segments.prefix_starts, segments.prefix_lengths, strict=True
        )
        for place in (np.arange(prefix, prefix + num_prefix), np.arange(start, start + length))
    ]
    return Flat(
        query_bounds=_bounds(segments.lengths, device),
        key_bounds=_bounds(num_keys, device),
        keys=torch.from_numpy(np.concatenate(keys)).to(device),
        most_queries=int(segments.lengths.max()),
        most_keys=int(num_keys.max()),
    )


def _bounds(lengths: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device)


def _divide(segments: Segments) -> Iterator[list[int]]:
    """Segments that go well together: with and without a prefix apart, by number of queries, then of keys."""
    lengths, prefixes = segments.lengths.tolist(), segments.prefix_lengths.tolist()

    def kind(index: int) -> tuple[bool, int]:
        has_prefix = prefixes[index] > 0
        return has_prefix, math.ceil(math.log(lengths[index], _CLASS_RATIO)) if has_prefix else 0

    order = sorted(range(len(lengths)), key=lambda i: (kind(i), -prefixes[i] - lengths[i], -lengths[i], i))
    members: list[int] = []
    num_pairs = most_queries = most_keys = 0
    for index in order:
        queries, keys = lengths[index], lengths[index] + prefixes[index]
        wide, high = max(most_queries, queries), max(most_keys, keys)
        padding = (len(members) + 1) * wide * high - num_pairs - queries * keys
        is_wasteful = padding > max(_CALL_PAIRS, _MOST_PADDING * (num_pairs + queries * keys))
        if members and (is_wasteful or kind(index)[0] != kind(members[0])[0]):
            yield members
            members, num_pairs, wide, high = [], 0, queries, keys
        members.append(index)
        num_pairs += queries * keys
        most_queries, most_keys = wide, high
    yield members


def _block(segments: Segments, members: list[int]) -> tuple[Block, npt.NDArray[np.int64]]:
    """A block on the CPU, and its queries. Prefixes are padded on the left, what follows on the right."""
    lengths, prefixes = segments.lengths[members], segments.prefix_lengths[members]
    starts, prefix_starts = segments.starts[members], segments.prefix_starts[members]
    own, most_prefix = np.arange(lengths.max()), int(prefixes.max())
    queries = starts[:, None] + np.minimum(own, lengths[:, None] - 1)
    key_positions = np.arange(most_prefix + len(own)) - (most_prefix - prefixes[:, None])  # [S, K]
    keys = np.concatenate([prefix_starts[:, None] + np.maximum(key_positions[:, :most_prefix], 0), queries], axis=1)
    query_positions = prefixes[:, None] + own
    rows = slice(None) if (prefixes != most_prefix).any() else slice(1)
    block = Block(
        queries=torch.from_numpy(queries),
        keys=torch.from_numpy(keys),
        query_positions=torch.from_numpy(query_positions[rows]),
        key_positions=torch.from_numpy(key_positions[rows]),
        is_square=most_prefix == 0,
    )
    return block, queries


def _on(block: Block, device: torch.device) -> Block:
    return Block(
        queries=block.queries.to(device),
        keys=block.keys.to(device),
        query_positions=block.query_positions.to(device),
        key_positions=block.key_positions.to(device),
        is_square=block.is_square,
    )
