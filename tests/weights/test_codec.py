"""Weight states become objects and come back bit for bit; a manifest that lies is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import WeightError
from pipeline.weights import HostTensor, WeightKind, WeightState
from pipeline.weights.codec import Encoder, WeightObject, decode
from pipeline.weights.manifest import DTYPE_BYTES, decode_manifest
from pipeline.weights.protocol import HEADER_BYTES, Header
from pipeline.weights.sealed import digest
from tests.weights.states import make_state, same, tensor

LIMIT = 1 << 30
SESSION = bytes(range(16))


@st.composite
def host_tensors(draw: st.DrawFn) -> HostTensor:
    """Any dtype and shape, scalars and empty ones too, of any bits: NaN, -0.0 and all."""
    dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    num_bytes = math.prod(shape) * DTYPE_BYTES[dtype]
    data = draw(st.binary(min_size=num_bytes, max_size=num_bytes))
    return HostTensor(dtype=dtype, shape=shape, data=memoryview(data))


def states() -> st.SearchStrategy[WeightState]:
    """Any weight state."""
    return st.builds(
        WeightState,
        weight_version=st.integers(0, 2**63 - 1),
        kind=st.sampled_from(WeightKind),
        tensors=st.dictionaries(st.text(min_size=1, max_size=20), host_tensors(), min_size=1, max_size=6),
    )


def received(item: WeightObject) -> WeightState:
    """What a subscriber makes of an object."""
    manifest = decode_manifest(item.payload, max_model_bytes=LIMIT)
    assert manifest == item.manifest
    assert [digest(tile) for tile in item.tiles] == [manifest.tile_hash(i) for i in range(manifest.num_tiles)]
    return decode(manifest, memoryview(b"".join(item.tiles)))


@settings(deadline=None)
@given(state=states(), tile_bytes=st.integers(1, 300))
def test_any_state_comes_back_bit_for_bit(state: WeightState, tile_bytes: int) -> None:
    item = Encoder(session=SESSION, tile_bytes=tile_bytes).encode(state)
    assert same(received(item), state)


def test_equal_states_make_equal_objects_whatever_the_memory_held_before() -> None:
    encoder = Encoder(session=SESSION, tile_bytes=4096)
    first = encoder.encode(make_state(1)).payload
    for version in range(2, 5):
        encoder.encode(make_state(version))
    assert encoder.encode(make_state(1)).payload == first


def test_tensors_start_where_any_framework_can_read_them() -> None:
    state = make_state(0)
    buffer = np.empty(1 << 16, dtype=np.uint8)
    manifest = Encoder(session=SESSION, tile_bytes=4096).encode(state).manifest
    for item in decode(manifest, buffer.data).tensors.values():
        start = np.frombuffer(item.data, dtype=np.uint8).ctypes.data
        assert (start - buffer.ctypes.data) % 64 == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"weight_version": -1}, "negative"),
        ({"tensors": {}}, "without tensors"),
        ({"tensors": {"": tensor([1.0], "float64")}}, "name is ''"),
        ({"tensors": {"a": tensor([1.0], "float32")}}, "8 bytes"),
        ({"tensors": {"a": tensor([1.0], "decimal")}}, "decimal"),
        ({"tensors": {"a": tensor([1.0], "float64", (-1,))}}, "shape"),
        ({"tensors": {"a": HostTensor(dtype="uint8", shape=(2,), data=memoryview(b"abcd")[::2])}}, "contiguous"),
        ({"weight_version": 2**63}, "too large"),
        ({"weight_version": 3.0}, "3.0 is a float"),
        ({"weight_version": np.int64(3)}, r"int\(version\)"),
        ({"kind": "snapshot"}, "WeightKind.SNAPSHOT"),
        ({"tensors": {"a\ud800": tensor([1.0], "float64")}}, "Unicode"),
        ({"tensors": {7: tensor([1.0], "float64")}}, "name is 7"),
        ({"tensors": {"a": np.zeros(3)}}, "ndarray, where a HostTensor"),
        ({"tensors": {"a": tensor([1.0], "float64", (np.int64(1),))}}, "not one of int"),  # type: ignore[arg-type]
        ({"tensors": {"a": HostTensor(dtype="uint8", shape=(2,), data=b"ab")}}, r"memoryview\(data\)"),  # type: ignore[arg-type]
    ],
)
def test_a_state_that_contradicts_itself_is_refused(changes: dict[str, object], reason: str) -> None:
    state = replace(make_state(0), **changes)  # type: ignore[arg-type]
    with pytest.raises(WeightError, match=reason):
        Encoder(session=SESSION, tile_bytes=4096).encode(state)


@settings(deadline=None)
@given(position=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_a_manifest_with_one_byte_changed_is_refused(position: int, flip: int) -> None:
    payload = bytearray(Encoder(session=SESSION, tile_bytes=4096).encode(make_state(3)).payload)
    payload[position % len(payload)] ^= flip
    with pytest.raises(WeightError, match="hash"):
        decode_manifest(bytes(payload), max_model_bytes=LIMIT)


@settings(deadline=None)
@given(payload=st.binary(max_size=300))
def test_random_bytes_are_no_manifest_even_under_a_true_hash(payload: bytes) -> None:
    for claimed in (payload, digest(payload) + payload):
        with pytest.raises(WeightError):
            decode_manifest(claimed, max_model_bytes=LIMIT)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schema", 1),
        ("kind", "delta"),
        ("session", b"short"),
        ("session", "text"),
        ("weight_version", -1),
        ("weight_version", True),
        ("num_bytes", LIMIT + 1),
        ("num_bytes", 40_001),
        ("tile_bytes", 0),
        ("tile_bytes", 1 << 40),
        ("tile_hashes", b""),
        ("tile_hashes", bytes(16 * 1000)),
        ("tensors", []),
        ("tensors", [["a", "uint8", [10], 0]]),
        ("tensors", [["a", "uint8", [10], 0, 11]]),
        ("tensors", [["a", "uint8", [40_064], 0, 40_064], ["b", "uint8", [1], 0, 1]]),
        ("tensors", [["a", "uint8", [40_064], 64, 40_064]]),
        ("tensors", [["a", "uint8", [2**62, 2**62], 0, 40_064]]),
        ("tensors", [["a", "uint8", [20_000], 0, 20_000], ["a", "uint8", [20_000], 20_032, 20_000]]),
        ("tensors", 7),
        ("tensors", [[7, "uint8", [10], 0, 10]]),
        ("tensors", [["a", "uint8", "10", 0, 10]]),
        ("surprise", 1),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(field: str, value: object) -> None:
    fields = msgpack.unpackb(Encoder(session=SESSION, tile_bytes=4096).encode(make_state(3)).payload[16:])
    body = msgpack.packb({**fields, field: value})
    with pytest.raises(WeightError):
        decode_manifest(digest(body) + body, max_model_bytes=LIMIT)


@settings(deadline=None)
@given(frame=st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES) | st.binary(max_size=100))
def test_a_header_is_read_as_it_was_written_or_not_at_all(frame: bytes) -> None:
    for candidate in (frame, b"RSW2" + frame[4:]):
        header = Header.parse(candidate)
        assert header is None or header.pack() == candidate
