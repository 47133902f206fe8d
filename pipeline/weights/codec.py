"""Weight states as weight objects, and back.

In: a `WeightState`, whose tensors lie anywhere in host memory. Out: a manifest and tiles, the
only copy that publishing makes; on the other side, tensors as views into one received buffer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pipeline.errors import WeightError
from pipeline.weights.delta import Method, Patch, make_patch
from pipeline.weights.manifest import (
    ALIGNMENT,
    Manifest,
    TensorEntry,
    check_names,
    check_newer,
    encode_manifest,
    lay_out,
    tile_widths,
)
from pipeline.weights.memory import BufferPool
from pipeline.weights.patches import PatchSet, gather
from pipeline.weights.protocol import NOTHING
from pipeline.weights.sealed import digest
from pipeline.weights.state import HostTensor, WeightKind, WeightState


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightObject:
    """One version, ready to be sent. payload: the encoded manifest. tiles: read only by contract.

    A tile is None as long as it has not come to who passes the version on.

    Every tile is memory of its own: one that a slow receiver still has on the way keeps itself
    alive, not the whole version.
    """

    manifest: Manifest
    payload: bytes
    tiles: Sequence[memoryview | None]


class Encoder:
    """Makes weight objects, in memory that retired objects gave back.

    num_threads: that hash and compare; 0 for all processors that this process may use, up to four.
    """

    def __init__(self, *, session: bytes, tile_bytes: int, num_threads: int = 0) -> None:
        self._session = session
        self._tile_bytes = tile_bytes
        self._pool = BufferPool(0, max_free=0)
        self._threads = ThreadPoolExecutor(num_threads or min(4, len(os.sched_getaffinity(0))), "weight-encoder")

    def encode(self, state: WeightState) -> WeightObject:
        """Copy `state` once and hash it. Raises WeightError where it contradicts itself."""
        table, num_bytes = content_table(state)
        tiles = self._borrow(num_bytes)
        write_content(state, table, tiles)
        return self.seal(state.weight_version, state.kind, table, tiles)

    def seal(
        self, weight_version: int, kind: WeightKind, table: tuple[TensorEntry, ...], tiles: tuple[memoryview, ...]
    ) -> WeightObject:
        """The object whose content lies in `tiles`, as `content_table` and `write_content` have laid it."""
        check_newer(weight_version, NOTHING)
        manifest = Manifest(
            session=self._session,
            weight_version=weight_version,
            kind=kind,
            num_bytes=sum(map(len, tiles)),
            tile_bytes=self._tile_bytes,
            tensors=table,
            tile_hashes=b"".join(self._threads.map(digest, tiles)),
        )
        root, payload = encode_manifest(manifest)
        return WeightObject(manifest=replace(manifest, root=root), payload=payload, tiles=tiles)

    def compare(self, base: WeightObject, item: WeightObject) -> PatchSet | None:
        """What turns `base` into `item`; None where they are not laid out alike."""
        started = time.perf_counter()
        before, after = base.manifest, item.manifest
        if not before.is_laid_out_like(after):
            return None

        def patch(index: int, width: int) -> Patch:
            old, new = base.tiles[index], item.tiles[index]
            if before.tile_hash(index) == after.tile_hash(index) or old is None or new is None:
                return Patch(Method.UNCHANGED, b"")
            return make_patch(np.frombuffer(old, dtype=np.uint8), np.frombuffer(new, dtype=np.uint8), width)

        widths = tile_widths(after)
        patches = list(self._threads.map(patch, range(len(widths)), widths))
        return gather(
            patches,
            base=(before.weight_version, before.root),
            manifest=after,
            encode_s=time.perf_counter() - started,
        )

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def _borrow(self, num_bytes: int) -> tuple[memoryview, ...]:
        starts = range(0, num_bytes, self._tile_bytes)
        size = min(self._tile_bytes, num_bytes)
        if (self._pool.buffer_bytes, self._pool.max_free) != (size, len(starts)):
            self._pool = BufferPool(size, max_free=len(starts))
        return tuple(self._pool.borrow()[: num_bytes - start] for start in starts)


def content_table(state: WeightState) -> tuple[tuple[TensorEntry, ...], int]:
    """Where the tensors of a state go, and the size of the object. Raises WeightError."""
    if not isinstance(state.kind, WeightKind):
        raise WeightError(f"weights of kind {state.kind!r}, where one of {[*WeightKind]} belongs: WeightKind.SNAPSHOT")
    check_names(state.tensors)
    for name, item in state.tensors.items():
        _check_carrier(name, item)
    table, num_bytes = lay_out((name, item.dtype, tuple(item.shape)) for name, item in state.tensors.items())
    for entry in table:
        data = state.tensors[entry.name].data
        if data.nbytes != entry.num_bytes or not data.c_contiguous:
            raise WeightError(
                f"tensor {entry.name!r}: {data.nbytes} bytes, contiguous: {data.c_contiguous}, "
                f"for {entry.dtype} {entry.shape}"
            )
    return table, num_bytes


def _check_carrier(name: str, item: object) -> None:
    """Raises WeightError where something else than a tensor of host memory stands in a state."""
    if not isinstance(item, HostTensor):
        raise WeightError(f"tensor {name!r} is a {type(item).__name__}, where a HostTensor belongs")
    if not isinstance(item.data, memoryview):
        raise WeightError(f"tensor {name!r}: its data is a {type(item.data).__name__}: pass memoryview(data)")
    if any(type(size) is not int for size in item.shape):
        raise WeightError(f"tensor {name!r} has the shape {item.shape!r}, not one of int: pass tuple(map(int, shape))")


def write_content(state: WeightState, table: tuple[TensorEntry, ...], tiles: Sequence[memoryview]) -> None:
    """Lay the tensors over the tiles; what lies between them becomes zero."""
    targets = [np.frombuffer(tile, dtype=np.uint8) for tile in tiles]
    zeros = np.zeros(ALIGNMENT, dtype=np.uint8)
    position = 0
    for entry in table:
        _fill(targets, position, zeros[: entry.offset - position])
        _fill(targets, entry.offset, _flat(state.tensors[entry.name].data))
        position = entry.offset + entry.num_bytes


def _flat(data: memoryview) -> npt.NDArray[np.uint8]:
    """`data` as bytes; a view of no elements cannot be cast, whatever its shape."""
    if data.nbytes == 0:
        return np.empty(0, dtype=np.uint8)
    return np.frombuffer(data, dtype=np.uint8)


def _fill(tiles: Sequence[npt.NDArray[np.uint8]], offset: int, source: npt.NDArray[np.uint8]) -> None:
    """Lay `source` over the tiles from `offset` on. numpy copies without the GIL."""
    while len(source):
        index, within = divmod(offset, len(tiles[0]))
        target = tiles[index][within : within + len(source)]
        target[:] = source[: len(target)]
        source, offset = source[len(target) :], offset + len(target)


def decode(manifest: Manifest, buffer: memoryview) -> WeightState:
    """The state that lies in `buffer`; its tensors are views, nothing is copied."""
    return WeightState(
        weight_version=manifest.weight_version,
        kind=manifest.kind,
        tensors={
            entry.name: HostTensor(
                dtype=entry.dtype,
                shape=entry.shape,
                data=buffer[entry.offset : entry.offset + entry.num_bytes],
            )
            for entry in manifest.tensors
        },
    )
