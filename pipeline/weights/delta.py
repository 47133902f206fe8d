"""Patches: what makes one bit pattern of a tile out of another.

In: the old and the new bytes of one tile. Out: a payload, the smallest of a few, that turns the old
into the new exactly, NaN, -0.0 and all. Nothing here knows floating point: words are integers. A
payload that is malformed raises `WeightError` and leaves the target as it was; whether the result
is right is for a hash to say.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import WeightError
from pipeline.weights.packing import compress, decompress
from pipeline.weights.sparse import Block, Indices, Words, read_block, word_type, write_block

_SURELY_SMALLEST = 8  # times smaller than the tile: whole values are not tried any more


class Method(IntEnum):
    """How a payload is to be understood."""

    UNCHANGED = 0  # empty: old and new are the same
    DENSE = 1  # the new bytes
    PACKED = 2  # a zstd frame of the new bytes
    DELTA = 3  # differences of some words; needs the exact base
    ABSOLUTE = 4  # new values of some words; may be applied twice


@dataclass(frozen=True, slots=True)
class Patch:
    """payload: of DENSE, it may be a view of the new bytes, not a copy."""

    method: Method
    payload: bytes | memoryview


def make_patch(old: NDArray[np.uint8], new: NDArray[np.uint8], width: int, *, idempotent: bool = False) -> Patch:
    """The smallest patch from `old` to `new`, both contiguous. width: bytes of a word, 1, 2, 4 or 8.

    idempotent: no differences; the patch has the same effect on any state that agrees outside its
    changes, and when it is applied twice. Raises WeightError unless both are as many whole words.
    """
    before, after = _words(old, width), _words(new, width)
    if old.size != new.size:
        raise WeightError(f"a tile of {old.size} bytes cannot become one of {new.size}")
    indices = _changed(old, new, width)
    if not indices.size:
        return Patch(Method.UNCHANGED, b"")
    values = after.take(indices)
    if not idempotent:
        values -= before.take(indices)
    sparse = write_block(Block(indices=indices, values=values, is_absolute=idempotent), len(after))
    patch = Patch(Method.ABSOLUTE if idempotent else Method.DELTA, sparse)
    if _SURELY_SMALLEST * len(sparse) <= new.size:
        return patch
    return min(patch, _whole(new), key=lambda item: len(item.payload))


def apply_patch(method: int, payload: bytes | memoryview, target: NDArray[np.uint8], width: int) -> None:
    """Change `target`, which is contiguous, in place. Raises WeightError before anything is changed."""
    words, payload = _words(target, width), memoryview(payload)
    if method == Method.UNCHANGED:
        _check_size(payload, 0)
    elif method == Method.DENSE:
        _check_size(payload, target.size)
        np.copyto(target, np.frombuffer(payload, dtype=np.uint8))
    elif method == Method.PACKED:
        np.copyto(target, np.frombuffer(decompress(payload, target.size), dtype=np.uint8))
    else:
        for block in _read_blocks(method, payload, len(words), width):
            block.apply(words)


def fold_patches(first: Patch, second: Patch, size: int, width: int) -> Patch:
    """One patch for a tile of `size` bytes that does what `first` and then `second` do.

    Differences from values that `first` sets are values too. Where only some are, the patch has both,
    and needs the exact base. Raises WeightError where a patch that has to be read is malformed.
    """
    if second.method in {Method.DENSE, Method.PACKED} or first.method == Method.UNCHANGED:
        return second
    if second.method == Method.UNCHANGED:
        return first
    words = np.zeros(size // word_type(width).itemsize, dtype=word_type(width))
    if first.method in {Method.DENSE, Method.PACKED}:
        target = words.view(np.uint8)
        apply_patch(first.method, first.payload, target, width)
        apply_patch(second.method, second.payload, target, width)
        return _whole(target)
    is_known = np.zeros(len(words), dtype=np.bool_)
    for patch in (first, second):
        for block in _read_blocks(patch.method, memoryview(patch.payload), len(words), width):
            block.apply(words)
            if block.is_absolute:
                is_known[block.indices] = True
    return _folded(words, is_known)


def _folded(words: Words, is_known: NDArray[np.bool_]) -> Patch:
    """words: values where is_known, differences elsewhere."""
    if is_known.all():
        return _whole(words.view(np.uint8))
    known, different = np.flatnonzero(is_known), np.flatnonzero((words != 0) & ~is_known)
    blocks = [
        write_block(Block(indices=indices, values=words[indices], is_absolute=is_absolute), len(words))
        for indices, is_absolute in ((different, False), (known, True))
        if indices.size
    ]
    if not blocks:
        return Patch(Method.UNCHANGED, b"")
    return Patch(Method.DELTA if different.size else Method.ABSOLUTE, b"".join(blocks))


def _read_blocks(method: int, payload: memoryview, num_words: int, width: int) -> list[Block]:
    """All blocks of a sparse patch: one of differences, one of values, or for DELTA one after the other."""
    if method not in {Method.DELTA, Method.ABSOLUTE}:
        raise WeightError(f"a patch of the unknown method {method}")
    blocks: list[Block] = []
    while payload and len(blocks) < 2:
        block, payload = read_block(payload, num_words, width)
        blocks.append(block)
    kinds = [block.is_absolute for block in blocks]
    if payload or kinds not in ([[True]] if method == Method.ABSOLUTE else [[False], [False, True]]):
        raise WeightError(f"a patch of method {method} with {len(blocks)} blocks and {len(payload)} bytes behind them")
    return blocks


def _whole(new: NDArray[np.uint8]) -> Patch:
    packed = compress(new)
    return Patch(Method.PACKED, packed) if len(packed) < new.size else Patch(Method.DENSE, new.data)


def _changed(old: NDArray[np.uint8], new: NDArray[np.uint8], width: int) -> Indices:
    """Which words differ, ascending. Few do: eight bytes are compared at once, and looked into where they differ."""
    before, after = _words(old, width), _words(new, width)
    if old.size % 8 or width == 8:
        return _positions(before != after)
    old_groups, new_groups = old.view(np.uint64), new.view(np.uint64)
    groups = _positions(old_groups != new_groups)
    is_changed = (old_groups.take(groups) ^ new_groups.take(groups)).view(before.dtype) != 0
    return _within(groups, np.flatnonzero(is_changed), 8 // width)


def _positions(mask: NDArray[np.bool_]) -> Indices:
    """`np.flatnonzero`, which is slow where a few percent are true: each of them is a branch that is not foreseen."""
    if len(mask) % 8:
        return np.flatnonzero(mask)
    eights = mask.view(np.uint64)
    groups = np.flatnonzero(eights != 0)
    return _within(groups, np.flatnonzero(eights[groups].view(np.bool_)), 8)


def _within(groups: Indices, found: Indices, size: int) -> Indices:
    """Where the `found` members of the listed groups of `size`, a power of two, are among those of all groups."""
    shift = size.bit_length() - 1
    indices = groups.take(found >> shift)
    indices <<= shift
    indices += found & (size - 1)
    return indices


def _words(tile: NDArray[np.uint8], width: int) -> Words:
    dtype = word_type(width)
    if tile.size % width:
        raise WeightError(f"a tile of {tile.size} bytes is not of whole words of {width}")
    return tile.view(dtype)


def _check_size(payload: memoryview, num_bytes: int) -> None:
    if payload.nbytes != num_bytes:
        raise WeightError(f"a payload of {payload.nbytes} bytes, {num_bytes} belong there")
