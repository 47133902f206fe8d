"""One weight object on its way in.

In: a checked manifest and tiles in any order, some of them wrong. Out: the weight state, once every
tile has proved to be what the manifest says. A tile is proved before it touches the buffer.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterable

import numpy as np

from pipeline.errors import WeightError
from pipeline.weights.codec import decode
from pipeline.weights.manifest import Manifest, digest
from pipeline.weights.state import WeightState

_INLINE_BYTES = 64 * 1024  # below, handing over to a thread costs more than the work
_MAX_FAILURES = 8  # of one tile, before the object is given up


class Transfer:
    """What is there of an object, and what is missing.

    buffer: `manifest.num_bytes` of host memory; it becomes the state's. verify_s: seconds spent
    on hashing and copying.
    """

    def __init__(self, manifest: Manifest, buffer: memoryview) -> None:
        self.manifest = manifest
        self.verify_s = 0.0
        self.num_verified = 0
        self._buffer = buffer
        self._missing = deque(range(manifest.num_tiles))
        self._is_verified = bytearray(manifest.num_tiles)
        self._failures: Counter[int] = Counter()

    @property
    def is_complete(self) -> bool:
        """Whether every tile is there."""
        return self.num_verified == self.manifest.num_tiles

    def next_missing(self) -> int | None:
        """A tile to order; None where all are there or on order."""
        return self._missing.popleft() if self._missing else None

    def put_back(self, indices: Iterable[int]) -> None:
        """These were ordered and did not come: order them again, before the others."""
        self._missing.extendleft(index for index in indices if not self._is_verified[index])

    async def accept(self, index: int, data: memoryview) -> bool:
        """Take tile `index`. False: it is not what the manifest says, and has to be ordered again.

        Raises WeightError where the same tile was wrong too often.
        """
        if len(data) > _INLINE_BYTES:
            is_right = await asyncio.to_thread(self._place, index, data)
        else:
            await asyncio.sleep(0)  # many small tiles that are all there must not hold up the event loop
            is_right = self._place(index, data)
        if is_right:
            self.num_verified += not self._is_verified[index]
            self._is_verified[index] = 1
            return True
        self._failures[index] += 1
        if self._failures[index] >= _MAX_FAILURES:
            raise WeightError(
                f"tile {index} of version {self.manifest.weight_version} was wrong {_MAX_FAILURES} times in a row"
            )
        return False

    def _place(self, index: int, data: memoryview) -> bool:
        started = time.perf_counter()
        size, offset = self.manifest.tile_size(index), index * self.manifest.tile_bytes
        is_right = len(data) == size and digest(data) == self.manifest.tile_hash(index)
        if is_right:
            target = np.frombuffer(self._buffer[offset : offset + size], dtype=np.uint8)
            np.copyto(target, np.frombuffer(data, dtype=np.uint8))
        self.verify_s += time.perf_counter() - started
        return is_right

    def state(self) -> WeightState:
        """The tensors, as views of the buffer."""
        assert self.is_complete
        return decode(self.manifest, self._buffer)
