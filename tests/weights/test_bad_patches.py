"""A patch that lies is refused, or does no other harm than a wrong tile; it never costs memory that it did not send."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.errors import WeightError
from pipeline.weights.delta import Method, Patch, apply_patch, fold_patches, make_patch
from tests.weights.tiles import WIDTHS, Tile, attempted, histories, near, refused

SPARSE = (Method.DELTA, Method.ABSOLUTE)


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


def block(*columns: bytes, changes: int, steps: int, wide: int, kind: int = 0, zero: int = 0) -> bytes:
    """A block of single bytes; kind 0: differences, 1: values."""
    header = struct.pack(f"<IIIBBBB{len(columns)}I", changes, steps, wide, 1, 1, kind, zero, *map(len, columns))
    return header + b"".join(columns)


def one(kind: int = 0, zero: int = 0) -> bytes:
    """A block that changes the first byte."""
    return block(b"\x01", b"\x02", changes=1, steps=1, wide=0, kind=kind, zero=zero)


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
        (block(b"\x22" * 50, changes=99, steps=0, wide=0), "99 changes without steps"),
        (block(b"\x22" * 51, changes=101, steps=0, wide=0), "101 changes"),
        (one(2), "kind 2"),
        (one(zero=1), "kind 0"),
        (2 * one(), "2 blocks"),
        (one(1), "1 blocks"),
        (one(1) + one(0), "2 blocks"),
        (one(0) + one(1) + b"\0", "1 bytes behind"),
        (one()[:-1], "that are there"),
        (one()[:20], "table"),
        (b"", "0 blocks"),
    ],
)
def test_a_block_that_contradicts_itself_is_refused(payload: bytes, reason: str) -> None:
    old = np.zeros(100, dtype=np.uint8)
    good = block(b"\x01\x63", b"\x12", changes=2, steps=2, wide=0)
    assert np.flatnonzero(attempted(Method.DELTA, good, old, 1)).tolist() == [0, 99]
    assert attempted(Method.DELTA, one(0) + one(1), old, 1)[0] == 2
    assert (attempted(Method.DELTA, block(b"\x22" * 50, changes=100, steps=0, wide=0), old, 1) == 1).all()
    with pytest.raises(WeightError, match=reason):
        attempted(Method.DELTA, payload, old, 1)


def _frame(content: bytes, **options: bool) -> bytes:
    return zstandard.ZstdCompressor(level=1, **options).compress(content)


# One block of 1000 bytes as they are, which are all there, after a header that claims a window of 64 MiB.
_WIDE_WINDOW = (
    struct.pack("<IBBH", 0xFD2FB528, 0x40, 0x80, 1000 - 256) + (1000 << 3 | 1).to_bytes(3, "little") + bytes(1000)
)


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(_frame(bytes(1 << 28)), id="claims more"),
        pytest.param(_frame(bytes(1 << 28), write_content_size=False), id="claims nothing"),
        pytest.param(struct.pack("<IBBQ", 0xFD2FB528, 0xC0, 0xFF, 1000), id="claims a window of exabytes"),
        pytest.param(_WIDE_WINDOW, id="claims a window larger than the tile"),
        pytest.param(struct.pack("<II", 0x184D2A50, 1000) + bytes(1000), id="is skipped"),
        pytest.param(_frame(bytes(1000)) + _frame(bytes(1 << 28)), id="has another behind it"),
        pytest.param(_frame(bytes(1000)) + b"\0", id="has a byte behind it"),
        pytest.param(_frame(bytes(999)), id="is too short"),
        pytest.param(_frame(np.random.default_rng(0).bytes(1000))[:-1], id="ends too soon"),
        pytest.param(b"", id="is nothing"),
    ],
)
def test_a_frame_takes_no_more_memory_than_its_tile(frame: bytes) -> None:
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


@pytest.mark.parametrize("method", [1, 2, 3, 4])
def test_a_fold_refuses_what_it_has_to_read(method: int) -> None:
    old, new = near(4000)
    good, bad = make_patch(old, new, 2), Patch(Method(method), b"nonsense")
    with pytest.raises(WeightError):
        fold_patches(bad, good, len(old), 2)
