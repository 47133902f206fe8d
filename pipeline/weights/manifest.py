"""The description of one weight object, and its proof.

In: a tensor table and the hashes of the tiles. Out: bytes that begin with the hash of the rest,
and back. Nothing in a manifest is believed before its root hash, its limits and its table have
been checked; what fails raises `WeightError`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pipeline.errors import WeightError
from pipeline.weights.protocol import MAX_MANIFEST_BYTES, MAX_VERSION
from pipeline.weights.sealed import HASH_BYTES, seal, unseal
from pipeline.weights.state import WeightKind

SCHEMA = 2
ALIGNMENT = 64  # bytes; a tensor's data can be read in place by any framework
MAX_TILE_BYTES = 64 * 1024 * 1024
_MAX_NAME = 1000
_MAX_DIMENSIONS = 64
_FIELDS = {
    "schema", "session", "weight_version", "kind", "num_bytes", "tile_bytes", "tensors", "tile_hashes",
}  # fmt: skip

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
    "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Where a tensor lies. offset, num_bytes: in the object, which is its tiles laid end to end."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One weight object.

    session: 16 bytes, of the publisher. weight_version: 0 or more. num_bytes: of the object.
    tile_bytes: of every tile but the last. tensors: by ascending offset. tile_hashes: xxh3-128 of
    each tile, end to end. root: xxh3-128 of all of the above as encoded.
    """

    session: bytes
    weight_version: int
    kind: WeightKind
    num_bytes: int
    tile_bytes: int
    tensors: tuple[TensorEntry, ...]
    tile_hashes: bytes
    root: bytes = b""

    @property
    def num_tiles(self) -> int:
        """Tiles of the object; 0 where all tensors are empty."""
        return math.ceil(self.num_bytes / self.tile_bytes)

    def is_laid_out_like(self, other: Manifest) -> bool:
        """Whether the same tensors lie at the same places, in the same tiles."""
        return (self.kind, self.tile_bytes, self.tensors) == (other.kind, other.tile_bytes, other.tensors)

    def tile_size(self, index: int) -> int:
        """Bytes of tile `index`."""
        return min(self.tile_bytes, self.num_bytes - index * self.tile_bytes)

    def tile_slice(self, index: int) -> slice:
        """Where tile `index` lies in the object."""
        return slice(index * self.tile_bytes, min(self.num_bytes, (index + 1) * self.tile_bytes))

    def tile_hash(self, index: int) -> bytes:
        """Hash that tile `index` must have."""
        return self.tile_hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]


def tile_widths(manifest: Manifest) -> list[int]:
    """Bytes of a number in each tile, 1, 2, 4 or 8: the narrowest that lies there, where dtypes share a tile."""
    widths = [8] * manifest.num_tiles
    for entry in manifest.tensors:
        if entry.num_bytes:
            width = DTYPE_BYTES[entry.dtype] // (2 if entry.dtype.startswith("complex") else 1)
            first = entry.offset // manifest.tile_bytes
            stop = -(-(entry.offset + entry.num_bytes) // manifest.tile_bytes)
            widths[first:stop] = [min(width, there) for there in widths[first:stop]]
    # A tile that is no whole number of numbers is one of bytes.
    return [math.gcd(width, manifest.tile_size(index), manifest.tile_bytes) for index, width in enumerate(widths)]


def lay_out(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[tuple[TensorEntry, ...], int]:
    """Table of (name, dtype, shape) in that order, each on the next multiple of ALIGNMENT.

    Returns the table and the size of the object. Raises WeightError: unknown dtype, bad shape.
    """
    table, end = [], 0
    for name, dtype, shape in tensors:
        offset = _aligned(end)
        num_bytes = _tensor_bytes(name, dtype, shape)
        table.append(TensorEntry(name=name, dtype=dtype, shape=shape, offset=offset, num_bytes=num_bytes))
        end = offset + num_bytes
    return tuple(table), end


def _aligned(end: int) -> int:
    """Where the tensor behind one that ends there begins."""
    return -(-end // ALIGNMENT) * ALIGNMENT


def _tensor_bytes(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    if dtype not in DTYPE_BYTES:
        raise WeightError(f"tensor {name!r} has dtype {dtype!r}; the weight channel knows {', '.join(DTYPE_BYTES)}")
    if len(shape) > _MAX_DIMENSIONS or any(size < 0 or size > MAX_VERSION for size in shape):
        raise WeightError(f"tensor {name!r} has the shape {shape}")
    return math.prod(shape) * DTYPE_BYTES[dtype]


def encode_manifest(manifest: Manifest) -> tuple[bytes, bytes]:
    """(root, encoded manifest). Raises WeightError where it would be too large to send."""
    payload = seal(
        {
            "schema": SCHEMA,
            "session": manifest.session,
            "weight_version": manifest.weight_version,
            "kind": manifest.kind.value,
            "num_bytes": manifest.num_bytes,
            "tile_bytes": manifest.tile_bytes,
            "tensors": table_rows(manifest.tensors),
            "tile_hashes": manifest.tile_hashes,
        }
    )
    if len(payload) > MAX_MANIFEST_BYTES:
        raise WeightError(
            f"the manifest of {manifest.num_tiles} tiles takes {len(payload)} bytes, more than {MAX_MANIFEST_BYTES}: "
            f"enlarge weights.tile_bytes = {manifest.tile_bytes}"
        )
    return payload[:HASH_BYTES], payload


def decode_manifest(payload: bytes | memoryview, *, max_model_bytes: int) -> Manifest:
    """The manifest in `payload`, checked. Raises WeightError saying what is wrong with it."""
    manifest = unseal(payload, _read, what="the manifest", names=_FIELDS, schema=SCHEMA, max_bytes=MAX_MANIFEST_BYTES)
    _check(manifest, max_model_bytes)
    return manifest


def _read(fields: dict[str, Any], root: bytes) -> Manifest:
    return Manifest(
        session=_bytes(fields["session"]),
        weight_version=_natural(fields["weight_version"]),
        kind=WeightKind(fields["kind"]),
        num_bytes=_natural(fields["num_bytes"]),
        tile_bytes=_natural(fields["tile_bytes"]),
        tensors=read_table(fields["tensors"]),
        tile_hashes=_bytes(fields["tile_hashes"]),
        root=root,
    )


def table_rows(table: Iterable[TensorEntry]) -> list[list[Any]]:
    """A table in plain values; `read_table` reads it."""
    return [[item.name, item.dtype, list(item.shape), item.offset, item.num_bytes] for item in table]


def read_table(rows: Iterable[Iterable[object]]) -> tuple[TensorEntry, ...]:
    """The table that was written as these rows. Raises TypeError where something is of the wrong type."""
    return tuple(_read_entry(*row) for row in rows)


def _read_entry(name: object, dtype: object, shape: object, offset: object, num_bytes: object) -> TensorEntry:
    if not isinstance(name, str) or not isinstance(dtype, str) or not isinstance(shape, list):
        raise TypeError("a tensor's name, dtype or shape is of the wrong type")
    return TensorEntry(
        name=name,
        dtype=dtype,
        shape=tuple(_natural(size) for size in shape),
        offset=_natural(offset),
        num_bytes=_natural(num_bytes),
    )


def _natural(value: object) -> int:
    if type(value) is not int or not 0 <= value <= MAX_VERSION:
        raise TypeError(f"{value!r} is not a number of 0 or more")
    return value


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(f"{type(value).__name__} where bytes belong")
    return value


def _check(manifest: Manifest, max_model_bytes: int) -> None:
    if manifest.num_bytes > max_model_bytes:
        raise WeightError(
            f"version {manifest.weight_version} claims {manifest.num_bytes} bytes, more than "
            f"weights.max_model_bytes = {max_model_bytes}"
        )
    if len(manifest.session) != HASH_BYTES or not 0 < manifest.tile_bytes <= MAX_TILE_BYTES:
        raise WeightError(f"the manifest has tiles of {manifest.tile_bytes} bytes or no session")
    if len(manifest.tile_hashes) != manifest.num_tiles * HASH_BYTES:
        raise WeightError(f"{len(manifest.tile_hashes)} bytes of hashes for {manifest.num_tiles} tiles")
    check_names(item.name for item in manifest.tensors)
    end = 0
    for item in manifest.tensors:
        size = _tensor_bytes(item.name, item.dtype, item.shape)
        if (item.offset, item.num_bytes) != (_aligned(end), size):
            raise WeightError("the manifest's tensors overlap or leave holes, or have a size that is not theirs")
        end = item.offset + size
    if end != manifest.num_bytes:
        raise WeightError("the manifest's tensors do not end where its content does")


def check_names(names: Iterable[object]) -> None:
    """Raises WeightError unless there are names, each of them once, of sane length, and text that can be written."""
    listed = list(names)
    if not listed:
        raise WeightError("a weight object without tensors")
    for name in listed:
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME or not _is_unicode(name):
            raise WeightError(f"a tensor's name is {name!r:.100}: 1 to {_MAX_NAME} characters of Unicode can be sent")
    if len(set(listed)) != len(listed):
        raise WeightError("tensor names are not unique")


def _is_unicode(name: str) -> bool:
    return name.isascii() or not any("\ud800" <= character <= "\udfff" for character in name)


def check_newer(version: object, newest: int) -> None:
    """Raises WeightError unless `version` is a number that can be sent, and above `newest`."""
    if type(version) is not int:
        raise WeightError(f"weight version {version!r} is a {type(version).__name__}: pass int(version)")
    if not 0 <= version <= MAX_VERSION:
        raise WeightError(f"weight version {version} is negative or too large")
    if version <= newest:
        raise WeightError(f"weight version {version} is not newer than {newest}, which is published")
