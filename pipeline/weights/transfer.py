"""One weight object on its way in, whole or as what has changed.

In: a checked manifest and pieces in any order, some of them wrong. Out: the weight state, once every
tile has proved to be what the manifest says.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.errors import WeightError
from pipeline.weights.codec import decode
from pipeline.weights.delta import apply_patch
from pipeline.weights.manifest import Manifest, tile_widths
from pipeline.weights.patches import PatchTable, split_parcel
from pipeline.weights.protocol import Kind
from pipeline.weights.sealed import digest
from pipeline.weights.state import WeightState

_INLINE_BYTES = 64 * 1024  # below, handing over to a thread costs more than the work
_MAX_FAILURES = 8  # of one tile, before the object is given up


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """A version that is complete and proved. buffer: holds it; read only by contract."""

    manifest: Manifest
    buffer: memoryview

    def tile(self, index: int) -> npt.NDArray[np.uint8]:
        """The bytes of a tile."""
        return np.frombuffer(self.buffer[self.manifest.tile_slice(index)], dtype=np.uint8)

    def state(self) -> WeightState:
        """The tensors, as views of the buffer."""
        return decode(self.manifest, self.buffer)


class Transfer(ABC):
    """What is there of an object, and what is missing.

    buffer: `manifest.num_bytes` of host memory; it becomes the state's. verify_s: seconds spent
    on hashing, copying and patching. num_bytes: that have come and were right.
    """

    request: Kind  # asks for a piece
    answer: Kind  # brings one

    def __init__(self, manifest: Manifest, buffer: memoryview, pieces: Iterable[int], num_pieces: int) -> None:
        self.manifest = manifest
        self.verify_s = 0.0
        self.num_bytes = 0
        self._missing = deque(pieces)
        self.num_verified = num_pieces - len(self._missing)
        self._content = Content(manifest, buffer)
        self._num_pieces = num_pieces
        self._is_verified = bytearray(num_pieces)
        self._failures: Counter[int] = Counter()

    @property
    def buffer(self) -> memoryview:
        """Where the content comes to lie. Of which only those tiles are proved that `has_tile`."""
        return self._content.buffer

    @abstractmethod
    def piece_size(self, index: int) -> int:
        """Bytes of a piece."""

    @abstractmethod
    def has_tile(self, index: int) -> bool:
        """Whether that tile is there, and proved."""

    @property
    @abstractmethod
    def key(self) -> bytes:
        """What its pieces are asked for by."""

    @property
    def is_complete(self) -> bool:
        """Whether every piece is there."""
        return self.num_verified == self._num_pieces

    def next_missing(self) -> int | None:
        """A piece to order; None where all are there or on order."""
        return self._missing.popleft() if self._missing else None

    def put_back(self, indices: Iterable[int]) -> None:
        """These were ordered and did not come: order them again, before the others."""
        self._missing.extendleft(index for index in indices if not self._is_verified[index])

    async def accept(self, index: int, data: memoryview) -> bool:
        """Take piece `index`. False: it is not what was promised, and has to be ordered again.

        Raises WeightError where the same piece was wrong too often.
        """
        if len(data) > _INLINE_BYTES:
            is_right = await asyncio.to_thread(self._timed_place, index, data)
        else:
            await asyncio.sleep(0)  # many small pieces that are all there must not hold up the event loop
            is_right = self._timed_place(index, data)
        if is_right:
            self.num_verified += not self._is_verified[index]
            self._is_verified[index] = 1
            self.num_bytes += len(data)
            return True
        self._failures[index] += 1
        if self._failures[index] >= _MAX_FAILURES:
            raise WeightError(
                f"{self.answer.name.lower()} {index} of version {self.manifest.weight_version} was wrong "
                f"{_MAX_FAILURES} times in a row"
            )
        return False

    def content(self) -> Content:
        """What has come, once it is complete."""
        assert self.is_complete
        return self._content

    def _timed_place(self, index: int, data: memoryview) -> bool:
        started = time.perf_counter()
        try:
            return self._place(index, data)
        finally:
            self.verify_s += time.perf_counter() - started

    @abstractmethod
    def _place(self, index: int, data: memoryview) -> bool:
        """Prove a piece and put what it says into the buffer. False: it is wrong."""


class SnapshotTransfer(Transfer):
    """Comes tile by tile. A tile is proved before it touches the buffer."""

    request = Kind.GET_TILE
    answer = Kind.TILE

    def __init__(self, manifest: Manifest, buffer: memoryview) -> None:
        super().__init__(manifest, buffer, range(manifest.num_tiles), manifest.num_tiles)

    @property
    def key(self) -> bytes:
        """The root of the manifest."""
        return self.manifest.root

    def piece_size(self, index: int) -> int:
        """Of a tile."""
        return self.manifest.tile_size(index)

    def has_tile(self, index: int) -> bool:
        """Whether it has come."""
        return bool(self._is_verified[index])

    def _place(self, index: int, data: memoryview) -> bool:
        is_right = len(data) == self.manifest.tile_size(index) and digest(data) == self.manifest.tile_hash(index)
        if is_right:
            np.copyto(self._content.tile(index), np.frombuffer(data, dtype=np.uint8))
        return is_right


class PatchTransfer(Transfer):
    """Comes parcel by parcel. A parcel is proved before it is applied, and every tile of the result after it.

    base: the version and root that `table` starts from; it stays as it is. keeps_parcels: for others.
    """

    request = Kind.GET_PARCEL
    answer = Kind.PARCEL

    def __init__(
        self, manifest: Manifest, buffer: memoryview, table: PatchTable, base: Content, *, keeps_parcels: bool = False
    ) -> None:
        filled = [parcel for parcel in range(table.num_parcels) if table.parcel_size(parcel)]
        super().__init__(manifest, buffer, filled, table.num_parcels)
        self.table = table
        self._base = base
        self._widths = tile_widths(manifest)
        self._keeps_parcels = keeps_parcels
        self._kept: dict[int, bytes] = {}
        self._unchanged = sorted(set(range(table.num_parcels)) - set(filled))

    def piece_size(self, index: int) -> int:
        """Of a parcel."""
        return self.table.parcel_size(index)

    def has_tile(self, index: int) -> bool:
        """Whether its parcel has come."""
        return bool(self._is_verified[bisect_right(self.table.bounds, index) - 1])

    def parcel(self, index: int) -> bytes | None:
        """A parcel that has come; only where they are kept."""
        return self._kept.get(index, b"" if not self.table.parcel_size(index) else None)

    @property
    def key(self) -> bytes:
        """The identity of the table."""
        return self.table.identity

    async def place_unchanged(self) -> None:
        """What no parcel is needed for. Raises WeightError where the base is not what it was."""
        unchanged, self._unchanged = self._unchanged, []
        for parcel in unchanged:
            await asyncio.to_thread(self._timed_place, parcel, memoryview(b""))
            self._is_verified[parcel] = 1

    def _place(self, index: int, data: memoryview) -> bool:
        if not self.table.is_parcel(index, data):
            return False
        for tile, patch in zip(self.table.tiles_of(index), split_parcel(self.table, index, data), strict=True):
            target = self._content.tile(tile)
            np.copyto(target, self._base.tile(tile))
            apply_patch(patch.method, patch.payload, target, self._widths[tile])
            if digest(target.data) != self.manifest.tile_hash(tile):
                raise WeightError(
                    f"tile {tile} of version {self.manifest.weight_version} is wrong after its patch: "
                    f"version {self.table.base_version} was changed in memory"
                )
        if self._keeps_parcels:
            self._kept[index] = bytes(data)
        return True
