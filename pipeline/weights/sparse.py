"""A block: which words of a tile change, and how.

In: ascending indices and a value for each. Out: bytes near the entropy of both, and back. Indices
of a block that was read are ascending and inside the tile, whatever the bytes were; all else raises
`WeightError`. docs/protocol.md specifies every byte.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import WeightError
from pipeline.weights.packing import pack_column, unpack_column

Words = NDArray[np.unsignedinteger[Any]]
Indices = NDArray[np.intp]

_HEADER = struct.Struct("<IIIBBBB")  # changes, steps, wide codes, bytes of a step, bytes of a word, is absolute, 0
_STEP_BYTES = (1, 2)
_FAR = 400  # words between changes on average, above which a step of two bytes is smaller
_WIDE = 15  # the code of four bits that says: look among the wide codes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """Changes of some words of a tile.

    indices: ascending, [n]. values: [n], added to the words modulo their size, or put in their place
    if is_absolute.
    """

    indices: Indices
    values: Words
    is_absolute: bool

    def apply(self, words: Words) -> None:
        """Change `words` in place."""
        values = self.values
        if not self.is_absolute:
            # Indices are inside: clipping never happens, and is quicker than looking for one that is not.
            values = words.take(self.indices, mode="clip") + values
        words[self.indices] = values


def word_type(width: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Little-endian words of `width` bytes. Raises WeightError unless that is 1, 2, 4 or 8."""
    if width not in {1, 2, 4, 8}:
        raise WeightError(f"words of {width} bytes, not of 1, 2, 4 or 8")
    return np.dtype(f"<u{width}")


def write_block(block: Block, num_words: int) -> bytes:
    """The block of a tile of `num_words`, which has at least one change.

    Differences take at most 64 bytes more than the tile, however many and however large: where they
    would, those of all words are written, 0 included, and no steps.
    """
    payload = _write(block, num_words)
    if block.is_absolute or len(payload) <= num_words * block.values.itemsize:
        return payload
    differences = np.zeros(num_words, dtype=block.values.dtype)
    block.apply(differences)
    return _write(Block(indices=np.arange(num_words), values=differences, is_absolute=False), num_words)


def _write(block: Block, num_words: int) -> bytes:
    num_changes, width = len(block.indices), block.values.itemsize
    step_bytes = 2 if num_words > _FAR * num_changes else 1
    steps = _steps(block.indices, step_bytes) if num_changes < num_words else np.empty(0, dtype=np.uint8)
    codes = block.values if block.is_absolute else _zigzag(block.values)
    columns = _planes(steps)
    is_wide = codes >= _WIDE
    num_wide = int(np.count_nonzero(is_wide))
    # A wide code costs its own bytes; where many are wide, short ones gain nothing.
    if 4 * num_wide < num_changes:
        columns += [_nibbles(np.minimum(codes, _WIDE).astype(np.uint8)), *_planes(codes[is_wide])]
    else:
        num_wide = num_changes
        columns += _planes(codes)
    packed = [pack_column(column) for column in columns if column.size]
    header = _HEADER.pack(num_changes, len(steps), num_wide, step_bytes, width, block.is_absolute, 0)
    return b"".join([header, np.array([len(column) for column in packed], dtype="<u4").tobytes(), *packed])


def read_block(payload: memoryview, num_words: int, width: int) -> tuple[Block, memoryview]:
    """The block at the beginning of `payload`, and what follows it. Raises WeightError."""
    if len(payload) < _HEADER.size:
        raise WeightError(f"a block of {len(payload)} bytes")
    num_changes, num_steps, num_wide, step_bytes, word_bytes, kind, zero = _HEADER.unpack_from(payload)
    if not 0 < num_changes <= (num_steps or num_changes) <= num_words or num_wide > num_changes:
        raise WeightError(f"{num_changes} changes in {num_steps} steps, {num_wide} wide, of {num_words} words")
    if step_bytes not in _STEP_BYTES or word_bytes != width or kind > 1 or zero:
        raise WeightError(f"a block of kind {kind}, steps of {step_bytes} bytes, words of {word_bytes}, not {width}")
    num_short = (num_changes + 1) // 2 if num_wide < num_changes else 0
    groups = ([num_steps] * step_bytes, [num_short], [num_wide] * width)
    columns, rest = _read_columns(payload[_HEADER.size :], [length for group in groups for length in group if length])
    if num_steps:
        indices = _indices(_join(columns[:step_bytes]), num_changes, num_words)
        columns = columns[step_bytes:]
    elif num_changes == num_words:
        indices = np.arange(num_words)
    else:
        raise WeightError(f"{num_changes} changes without steps of {num_words} words")
    codes = _join(columns[-width:]) if num_wide else np.empty(0, dtype=word_type(width))
    if num_short:
        codes = _fill_in(columns[0], num_changes, codes)
    values = codes if kind else _unzigzag(codes)
    return Block(indices=indices, values=values, is_absolute=bool(kind)), rest


def _read_columns(payload: memoryview, lengths: Sequence[int]) -> tuple[list[NDArray[np.uint8]], memoryview]:
    position = 4 * len(lengths)
    if len(payload) < position:
        raise WeightError("a block ends within its table")
    columns = []
    for length, size in zip(lengths, np.frombuffer(payload[:position], dtype="<u4").tolist(), strict=True):
        if size > min(length, len(payload) - position):
            raise WeightError(f"a column of {length} bytes takes {size}, of {len(payload) - position} that are there")
        columns.append(unpack_column(payload[position : position + size], length))
        position += size
    return columns, payload[position:]


def _steps(indices: Indices, step_bytes: int) -> Words:
    """Distances from each change to the next, the first from one word before the tile.

    A distance that a step cannot hold is preceded by steps of 0, each of which stands for the
    largest step and changes nothing.
    """
    largest = 256**step_bytes - 1
    gaps = np.empty_like(indices)
    gaps[0] = indices[0] + 1
    np.subtract(indices[1:], indices[:-1], out=gaps[1:])
    far = np.flatnonzero(gaps > largest)
    if not far.size:
        return gaps.astype(word_type(step_bytes))
    num_before = (gaps[far] - 1) // largest
    gaps[far] -= largest * num_before
    return np.insert(gaps.astype(word_type(step_bytes)), np.repeat(far, num_before), 0)


def _indices(steps: Words, num_changes: int, num_words: int) -> Indices:
    is_change = steps != 0
    if np.count_nonzero(is_change) != num_changes or not is_change[-1]:
        raise WeightError(f"the steps do not lead to {num_changes} changes")
    gaps = steps.astype(np.intp)
    if len(steps) > num_changes:
        gaps[~is_change] = 256**steps.itemsize - 1
    gaps[0] -= 1
    indices = np.cumsum(gaps)
    if indices[-1] >= num_words:
        raise WeightError(f"a change of word {indices[-1]} in a tile of {num_words}")
    return indices if len(steps) == num_changes else indices[is_change]


def _planes(words: Words) -> list[NDArray[np.uint8]]:
    """The lowest bytes of all words, then the next: bytes of one kind are together."""
    table = words.view(np.uint8).reshape(-1, words.itemsize)
    return [np.ascontiguousarray(table[:, place]) for place in range(words.itemsize)]


def _join(planes: Sequence[NDArray[np.uint8]]) -> Words:
    if len(planes) == 1:
        return planes[0]
    table = np.empty((len(planes[0]), len(planes)), dtype=np.uint8)
    for place, plane in enumerate(planes):
        table[:, place] = plane
    return table.reshape(-1).view(word_type(len(planes)))


def _zigzag(differences: Words) -> Words:
    """0, -1, 1, -2, ... become 0, 1, 2, 3, ...: small codes for what is near 0 on either side."""
    is_negative = differences >> (8 * differences.itemsize - 1)
    codes: Words = (differences << 1) ^ np.negative(is_negative)
    return codes


def _unzigzag(codes: Words) -> Words:
    differences: Words = (codes >> 1) ^ np.negative(codes & 1)
    return differences


def _nibbles(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two codes below 16 in each byte, the first in the lower half."""
    pairs: Words = np.append(codes, np.zeros(len(codes) % 2, dtype=np.uint8)).view("<u2")
    return (pairs | pairs >> 4).astype(np.uint8)


def _fill_in(nibbles: NDArray[np.uint8], num_codes: int, wide: Words) -> Words:
    """All codes: the short ones, and the wide ones in the places that are kept for them."""
    pairs = nibbles.astype("<u2")
    short = ((pairs | pairs << 4) & 0x0F0F).view(np.uint8)[:num_codes]
    places = np.flatnonzero(short == _WIDE)
    if len(places) != len(wide):
        raise WeightError(f"{len(wide)} wide codes for {len(places)} places")
    codes: Words = short.astype(wide.dtype)
    codes[places] = wide
    return codes
