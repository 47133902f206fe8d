"""Patches restore every bit, fold into what they do one after the other, and can lie without doing harm."""

from __future__ import annotations

import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.errors import WeightError
from pipeline.weights.delta import Method, Patch, apply_patch, fold_patches, make_patch

Tile = NDArray[np.uint8]

WIDTHS = (1, 2, 4, 8)
SPARSE = (Method.DELTA, Method.ABSOLUTE)
GUARD = 64  # bytes on either side of a target, which nothing may touch


@st.composite
def histories(draw: st.DrawFn, *, length: int = 2) -> tuple[int, list[Tile]]:
    """(width, states of one tile): random, constant or special words; some, none or all of them changed each time."""
    width = draw(st.sampled_from(WIDTHS))
    num_words = draw(st.one_of(st.integers(0, 40), st.integers(0, 3000)))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = np.dtype(f"<u{width}")
    top = 2 ** (8 * width) - 1
    special = np.array([0, 1, top, top // 2, top // 2 + 1, top // 3], dtype=dtype)
    words = random.choice(special, num_words) if draw(st.booleans()) else _noise(random, num_words, width)
    states = [words.view(np.uint8)]
    for _ in range(length - 1):
        words = words.copy()
        density = draw(st.sampled_from((0.0, 0.001, 0.01, 0.1, 0.5, 1.0)))
        where = np.flatnonzero(random.random(num_words) < density)
        match draw(st.sampled_from(("near", "far", "special", "equal"))):
            case "near":
                words[where] += random.integers(-9, 10, len(where)).astype(dtype)
            case "far":
                words[where] = _noise(random, len(where), width)
            case "special":
                words[where] = random.choice(special, len(where))
            case "equal":
                words[where] = special[2]
        states.append(words.view(np.uint8))
    return width, states


def _noise(random: np.random.Generator, num_words: int, width: int) -> NDArray[np.unsignedinteger]:
    return random.integers(0, 256, num_words * width, dtype=np.uint8).view(f"<u{width}")


def near(num_words: int, width: int = 2, *, every: int = 100, step: int = 1) -> tuple[Tile, Tile]:
    """Random words, and the same with every so many of them a little larger."""
    old = _noise(np.random.default_rng(num_words), num_words, width)
    new = old.copy()
    new[::every] += np.array(step, dtype=new.dtype)
    return old.view(np.uint8), new.view(np.uint8)


def applied(patch: Patch, old: Tile, width: int) -> Tile:
    """What `patch` makes of a copy of `old`, in the middle of memory that it must leave alone."""
    return attempted(patch.method, patch.payload, old, width)


def attempted(method: int, payload: bytes | memoryview, old: Tile, width: int) -> Tile:
    memory = np.full(len(old) + 2 * GUARD, 0xA5, dtype=np.uint8)
    target = memory[GUARD : GUARD + len(old)]
    target[:] = old
    try:
        apply_patch(method, payload, target, width)
    except WeightError:
        assert np.array_equal(target, old), "a refused patch has changed something"
        raise
    finally:
        assert (memory[:GUARD] == 0xA5).all()
        assert (memory[GUARD + len(old) :] == 0xA5).all()
    return target


def refused(method: int, payload: bytes | memoryview, old: Tile, width: int) -> bool:
    try:
        attempted(method, payload, old, width)
    except WeightError:
        return True
    return False


@settings(deadline=None)
@given(history=histories(), is_idempotent=st.booleans())
def test_any_change_comes_back_bit_for_bit(history: tuple[int, list[Tile]], is_idempotent: bool) -> None:
    width, (old, new) = history
    patch = make_patch(old, new, width, idempotent=is_idempotent)
    assert len(patch.payload) <= len(new)
    assert (patch.method is Method.UNCHANGED) == np.array_equal(old, new)
    assert np.array_equal(applied(patch, old, width), new)
    if is_idempotent:
        assert patch.method is not Method.DELTA
        assert np.array_equal(applied(patch, applied(patch, old, width), width), new)


@settings(deadline=None)
@given(history=histories(length=4), kinds=st.lists(st.booleans(), min_size=3, max_size=3))
def test_folded_patches_do_what_they_do_in_turn(history: tuple[int, list[Tile]], kinds: list[bool]) -> None:
    width, states = history
    patches = [
        make_patch(old, new, width, idempotent=kind) for (old, new), kind in zip(pairwise(states), kinds, strict=True)
    ]
    size = len(states[0])
    from_left = fold_patches(fold_patches(patches[0], patches[1], size, width), patches[2], size, width)
    from_right = fold_patches(patches[0], fold_patches(patches[1], patches[2], size, width), size, width)
    for folded in (from_left, from_right):
        assert np.array_equal(applied(folded, states[0], width), states[-1])
        if all(patch.method is not Method.DELTA for patch in patches):
            assert folded.method is not Method.DELTA


@settings(deadline=None)
@given(data=st.data(), width=st.sampled_from(WIDTHS), num_words=st.integers(1, 300))
def test_any_two_kinds_fold(data: st.DataObject, width: int, num_words: int) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    states = [_noise(random, num_words, width)]
    for _ in range(2):
        words = states[-1].copy()
        where = np.flatnonzero(random.random(num_words) < data.draw(st.sampled_from((0.0, 0.05, 0.5, 1.0))))
        words[where] += random.integers(0, 3, len(where)).astype(words.dtype)
        states.append(words)
    tiles = [words.view(np.uint8) for words in states]
    first, second = (_as(data.draw(st.sampled_from(Method)), *pair, width) for pair in pairwise(tiles))
    folded = fold_patches(first, second, len(tiles[0]), width)
    assert np.array_equal(applied(folded, tiles[0], width), tiles[2])


def _as(method: Method, old: Tile, new: Tile, width: int) -> Patch:
    """A patch by that method, or by whichever is possible."""
    if method is Method.DENSE:
        return Patch(method, new.data)
    if method is Method.PACKED:
        return Patch(method, zstandard.compress(new.tobytes()))
    return make_patch(old, new, width, idempotent=method is Method.ABSOLUTE)


def test_two_differences_that_cancel_fold_to_nothing() -> None:
    old, new = near(10_000)
    there, back = make_patch(old, new, 2), make_patch(new, old, 2)
    assert there.method is back.method is Method.DELTA
    assert fold_patches(there, back, len(old), 2) == Patch(Method.UNCHANGED, b"")


def test_floating_point_is_not_interpreted() -> None:
    patterns = np.array([0x7FC0, 0xFFC1, 0x8000, 0x0000, 0x7F80, 0xFF80, 0x0001, 0xFFFF], dtype="<u2")
    old = np.tile(patterns, 500)
    for shift in range(1, len(patterns)):
        new = old.copy()
        new[::97] = np.roll(old, shift)[::97]
        patch = make_patch(old.view(np.uint8), new.view(np.uint8), 2)
        assert patch.method is Method.DELTA
        assert np.array_equal(applied(patch, old.view(np.uint8), 2), new.view(np.uint8))


def test_the_smallest_method_is_chosen() -> None:
    old, new = near(100_000)
    noise = _noise(np.random.default_rng(1), 100_000, 2).view(np.uint8)
    assert make_patch(old, old, 2) == Patch(Method.UNCHANGED, b"")
    assert make_patch(old, new, 2).method is Method.DELTA
    assert make_patch(old, new, 2, idempotent=True).method is Method.ABSOLUTE
    assert make_patch(old, np.zeros_like(old), 2).method is Method.PACKED
    dense = make_patch(old, noise, 2)
    assert dense.method is Method.DENSE
    assert np.shares_memory(np.frombuffer(dense.payload, dtype=np.uint8), noise)


@pytest.mark.parametrize("gap", [1, 15, 254, 255, 256, 257, 510, 511, 512, 600, 65534, 65535, 65536, 131070, 131071])
def test_gaps_at_the_borders_of_a_step(gap: int) -> None:
    old = np.zeros(4 * 131072, dtype=np.uint8)
    for start in (0, gap):
        new = old.copy()
        new[start::gap] += 1
        patch = make_patch(old, new, 1)
        assert np.array_equal(applied(patch, old, 1), new)


def test_one_percent_of_a_tile_comes_near_its_entropy() -> None:
    random = np.random.default_rng(0)
    old = _noise(random, 1 << 19, 2)
    new = old.copy()
    where = np.flatnonzero(random.random(len(old)) < 0.01)
    new[where] += random.choice(np.array([1, 0xFFFF], dtype="<u2"), len(where))
    patch = make_patch(old.view(np.uint8), new.view(np.uint8), 2)
    share = len(where) / len(old)
    positions = -len(old) * (share * np.log2(share) + (1 - share) * np.log2(1 - share))
    assert len(patch.payload) < 1.08 * (positions + len(where)) / 8


@settings(deadline=None)
@given(history=histories(), is_idempotent=st.booleans(), data=st.data())
def test_a_damaged_payload_is_refused_or_tells_by_its_result(
    history: tuple[int, list[Tile]], is_idempotent: bool, data: st.DataObject
) -> None:
    """With an unknown method, a bit flipped, or an end that is missing or too long."""
    width, (old, new) = history
    patch = make_patch(old, new, width, idempotent=is_idempotent)
    payload = bytearray(patch.payload)
    assert refused(data.draw(st.integers(5, 300)), payload, old, width)
    assert refused(patch.method, bytes(payload) + b"\0", old, width)
    if payload:
        assert refused(patch.method, payload[: data.draw(st.integers(0, len(payload) - 1))], old, width)
        place = data.draw(st.integers(0, 8 * len(payload) - 1))
        payload[place // 8] ^= 1 << place % 8
        refused(patch.method, bytes(payload), old, width)


@settings(deadline=None, max_examples=300)
@given(method=st.integers(-1, 6), payload=st.binary(max_size=200), width=st.sampled_from(WIDTHS))
@example(method=3, payload=struct.pack("<IIIBB2x4I", 1, 1, 1, 1, 8, *[0] * 4), width=8)
def test_random_bytes_never_do_more_than_be_refused(method: int, payload: bytes, width: int) -> None:
    refused(method, payload, np.zeros(80, dtype=np.uint8), width)


@settings(deadline=None, max_examples=300)
@given(
    header=st.tuples(*[st.integers(0, 12)] * 3, st.integers(0, 3), st.just(2), st.integers(0, 2)),
    lengths=st.lists(st.integers(0, 12), max_size=5),
    columns=st.binary(max_size=40),
    method=st.sampled_from(SPARSE),
)
def test_headers_that_almost_make_sense(
    header: tuple[int, ...], lengths: list[int], columns: bytes, method: Method
) -> None:
    payload = struct.pack(f"<IIIBBBx{len(lengths)}I", *header, *lengths) + columns
    refused(method, payload, np.zeros(24, dtype=np.uint8), 2)


def block(*columns: bytes, changes: int, steps: int, wide: int) -> bytes:
    """A block of differences of single bytes."""
    header = struct.pack(f"<IIIBBBx{len(columns)}I", changes, steps, wide, 1, 1, 0, *map(len, columns))
    return header + b"".join(columns)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (block(b"\x01\x64", b"\x12", changes=2, steps=2, wide=0), "word 100"),
        (block(b"\x01\x00", b"\x02", changes=1, steps=2, wide=0), "1 changes"),
        (block(b"\x00\x00", b"\x02", changes=1, steps=2, wide=0), "1 changes"),
        (block(b"\x01", b"\x0f", changes=1, steps=1, wide=0), "0 wide codes for 1"),
        (block(b"\x01\x01", b"\x22", b"\x22", changes=2, steps=2, wide=1), "1 wide codes for 0"),
        (block(b"\x01", b"\x02\x02", changes=1, steps=1, wide=0), "takes 2"),
        (block(b"\x01" * 101, b"\x12" * 51, changes=101, steps=101, wide=0), "101 changes"),
        (block(b"", b"", changes=0, steps=0, wide=0), "0 changes"),
        (2 * block(b"\x01", b"\x02", changes=1, steps=1, wide=0), "2 blocks"),
        (block(b"\x01", b"\x02", changes=1, steps=1, wide=0)[:-1], "that are there"),
        (b"", "0 blocks"),
    ],
)
def test_a_block_that_contradicts_itself_is_refused(payload: bytes, reason: str) -> None:
    old = np.zeros(100, dtype=np.uint8)
    good = block(b"\x01\x63", b"\x12", changes=2, steps=2, wide=0)
    assert np.flatnonzero(attempted(Method.DELTA, good, old, 1)).tolist() == [0, 99]
    with pytest.raises(WeightError, match=reason):
        attempted(Method.DELTA, payload, old, 1)


def _frame(content: bytes, **options: bool) -> bytes:
    return zstandard.ZstdCompressor(level=1, **options).compress(content)


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(_frame(bytes(1 << 28)), id="claims more"),
        pytest.param(_frame(bytes(1 << 28), write_content_size=False), id="claims nothing"),
        pytest.param(struct.pack("<IBBQ", 0xFD2FB528, 0xC0, 0xFF, 1000), id="claims a window of exabytes"),
        pytest.param(struct.pack("<II", 0x184D2A50, 1000) + bytes(1000), id="is skipped"),
        pytest.param(_frame(bytes(1000)) + _frame(bytes(1 << 28)), id="has another behind it"),
        pytest.param(_frame(bytes(1000)) + b"\0", id="has a byte behind it"),
        pytest.param(_frame(bytes(999)), id="is too short"),
        pytest.param(_frame(np.random.default_rng(0).bytes(1000))[:-1], id="ends too soon"),
        pytest.param(b"", id="is nothing"),
    ],
)
def test_a_frame_takes_no_more_memory_than_its_tile(frame: bytes) -> None:
    import tracemalloc

    old = np.ones(1000, dtype=np.uint8)
    tracemalloc.start()
    try:
        with pytest.raises(WeightError):
            attempted(Method.PACKED, frame, old, 1)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_patch_of_other_words_or_another_size_is_refused() -> None:
    old, new = near(4000)
    patch = make_patch(old, new, 2)
    for width in (1, 4, 8):
        assert refused(patch.method, patch.payload, old, width)
    assert refused(patch.method, patch.payload, old[:100], 2)
    for tile, width in ((old[:-1], 2), (old, 3), (old, 0)):
        with pytest.raises(WeightError):
            apply_patch(Method.UNCHANGED, b"", tile, width)
    with pytest.raises(WeightError):
        make_patch(old, new[:-2], 2)


def test_threads_make_and_apply_patches_at_the_same_time() -> None:
    pairs = [near(50_000, every=every) for every in range(20, 60)]
    together = threading.Barrier(4, timeout=30)

    def work(start: int) -> bool:
        together.wait()
        return all(
            np.array_equal(applied(make_patch(old, new, 2), old, 2), new) for old, new in pairs[start:] + pairs[:start]
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(0, 40, 10)))
