"""Patches restore every bit, and fold into what they do one after the other."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.weights.delta import Method, Patch, fold_patches, make_patch
from tests.weights.tiles import WIDTHS, Tile, applied, histories, near, noise


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
        if all(patch.method is not Method.ABSOLUTE for patch in patches):
            assert len(folded.payload) <= size + 64
        if all(patch.method is not Method.DELTA for patch in patches):
            assert folded.method is not Method.DELTA


@settings(deadline=None)
@given(data=st.data(), width=st.sampled_from(WIDTHS), num_words=st.integers(1, 300))
def test_any_two_kinds_fold(data: st.DataObject, width: int, num_words: int) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    states = [noise(random, num_words, width)]
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


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("share", [0.5, 0.9, 0.99, 0.996, 0.999, 1.0])
def test_folded_differences_are_hardly_larger_than_the_tile(width: int, share: float) -> None:
    random = np.random.default_rng(width)
    words = [noise(random, 40_000, width)]
    for number in range(2):  # half of those that change, and the other half: noise
        changed = noise(random, 40_000, width)
        is_changed = (random.random(40_000) < share) & (np.arange(40_000) % 2 == number)
        words.append(np.where(is_changed, changed, words[-1]))
    tiles = [item.view(np.uint8) for item in words]
    first, second = (make_patch(*pair, width) for pair in pairwise(tiles))
    assert first.method is second.method is Method.DELTA
    folded = fold_patches(first, second, len(tiles[0]), width)
    assert len(folded.payload) <= len(tiles[0]) + 64
    assert np.array_equal(applied(folded, tiles[0], width), tiles[2])


def test_values_that_together_cover_a_tile_fold_into_the_whole_of_it() -> None:
    old = noise(np.random.default_rng(0), 999, 2)
    new = noise(np.random.default_rng(1), 999, 2)
    between = np.where(np.arange(999) % 2, old, new)
    tiles = [words.view(np.uint8) for words in (old, between, new)]
    first, second = (make_patch(*pair, 2, idempotent=True) for pair in pairwise(tiles))
    assert first.method is second.method is Method.ABSOLUTE
    folded = fold_patches(first, second, len(tiles[0]), 2)
    assert (folded.method, bytes(folded.payload)) == (Method.DENSE, tiles[2].tobytes())


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
    other = noise(np.random.default_rng(1), 100_000, 2).view(np.uint8)
    assert make_patch(old, old, 2) == Patch(Method.UNCHANGED, b"")
    assert make_patch(old, new, 2).method is Method.DELTA
    assert make_patch(old, new, 2, idempotent=True).method is Method.ABSOLUTE
    assert make_patch(old, np.zeros_like(old), 2).method is Method.PACKED
    dense = make_patch(old, other, 2)
    assert dense.method is Method.DENSE
    assert np.shares_memory(np.frombuffer(dense.payload, dtype=np.uint8), other)


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
    old = noise(random, 1 << 19, 2)
    new = old.copy()
    where = np.flatnonzero(random.random(len(old)) < 0.01)
    new[where] += random.choice(np.array([1, 0xFFFF], dtype="<u2"), len(where))
    patch = make_patch(old.view(np.uint8), new.view(np.uint8), 2)
    share = len(where) / len(old)
    positions = -len(old) * (share * np.log2(share) + (1 - share) * np.log2(1 - share))
    assert len(patch.payload) < 1.08 * (positions + len(where)) / 8


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
