"""Weight states as weight objects, and back.

In: a `WeightState`, whose tensors lie anywhere in host memory. Out: a manifest and tiles, the
only copy that publishing makes; on the other side, tensors as views into one received buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pipeline.errors import WeightError
from pipeline.weights.manifest import Manifest, check_names, digest, encode_manifest, lay_out
from pipeline.weights.memory import BufferPool
from pipeline.weights.protocol import MAX_VERSION
from pipeline.weights.state import HostTensor, WeightState


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightObject:
    """One version, ready to be sent. payload: the encoded manifest. tiles: read only by contract.

    Every tile is memory of its own: one that a slow receiver still has on the way keeps itself
    alive, not the whole version.
    """

    manifest: Manifest
    payload: bytes
    tiles: tuple[memoryview, ...]


class Encoder:
    """Makes weight objects, in memory that retired objects gave back."""

    def __init__(self, *, session: bytes, tile_bytes: int) -> None:
        self._session = session
        self._tile_bytes = tile_bytes
        self._pool = BufferPool(0, max_free=0)

    def encode(self, state: WeightState) -> WeightObject:
        """Copy `state` once and hash it. Raises WeightError where it contradicts itself."""
        if not 0 <= state.weight_version <= MAX_VERSION:
            raise WeightError(f"weight version {state.weight_version} is negative or too large")
        check_names(state.tensors)
        table, num_bytes = lay_out((name, item.dtype, item.shape) for name, item in state.tensors.items())
        for entry in table:
            data = state.tensors[entry.name].data
            if data.nbytes != entry.num_bytes or not data.c_contiguous:
                raise WeightError(
                    f"tensor {entry.name!r}: {data.nbytes} bytes, contiguous: {data.c_contiguous}, "
                    f"for {entry.dtype} {entry.shape}"
                )
        tiles = self._borrow(num_bytes)
        position = 0
        for entry in table:
            _fill(tiles, position, np.zeros(entry.offset - position, dtype=np.uint8), self._tile_bytes)
            _fill(tiles, entry.offset, _flat(state.tensors[entry.name].data), self._tile_bytes)
            position = entry.offset + entry.num_bytes
        manifest = Manifest(
            session=self._session,
            weight_version=state.weight_version,
            kind=state.kind,
            num_bytes=num_bytes,
            tile_bytes=self._tile_bytes,
            tensors=table,
            tile_hashes=b"".join(digest(tile) for tile in tiles),
        )
        root, payload = encode_manifest(manifest)
        return WeightObject(manifest=replace(manifest, root=root), payload=payload, tiles=tiles)

    def _borrow(self, num_bytes: int) -> tuple[memoryview, ...]:
        starts = range(0, num_bytes, self._tile_bytes)
        size = min(self._tile_bytes, num_bytes)
        if (self._pool.buffer_bytes, self._pool.max_free) != (size, len(starts)):
            self._pool = BufferPool(size, max_free=len(starts))
        return tuple(self._pool.borrow()[: num_bytes - start] for start in starts)


def _flat(data: memoryview) -> npt.NDArray[np.uint8]:
    """`data` as bytes; a view of no elements cannot be cast, whatever its shape."""
    if data.nbytes == 0:
        return np.empty(0, dtype=np.uint8)
    return np.frombuffer(data, dtype=np.uint8)


def _fill(tiles: Sequence[memoryview], offset: int, source: npt.NDArray[np.uint8], tile_bytes: int) -> None:
    """Lay `source` over the tiles from `offset` on. numpy copies without the GIL."""
    end = offset + len(source)
    cuts = [offset, *range((offset // tile_bytes + 1) * tile_bytes, end, tile_bytes), end]
    for start, stop in pairwise(cuts):
        if start == stop:
            continue
        index, within = divmod(start, tile_bytes)
        target = np.frombuffer(tiles[index], dtype=np.uint8)
        np.copyto(target[within : within + stop - start], source[start - offset : stop - offset])


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
