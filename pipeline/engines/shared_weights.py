"""Weights in memory that another process of this machine can map.

In: a `WeightState`. Out: a small description of where its tensors lie, and in the other process
the tensors themselves, without a copy. The memory belongs to the writer and has no name in any
file system: when the writer ends, however it ends, nothing of it is left.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.errors import WeightError
from pipeline.weights import WeightState
from pipeline.weights.codec import content_table, write_content
from pipeline.weights.manifest import TensorEntry, read_table, table_rows
from pipeline.weights.memfd import create_memory, map_memory


class SharedWeights:
    """One segment, written again and again. A reader may map it until the next `write`."""

    def __init__(self) -> None:
        self._fd = create_memory(0)
        self._content = np.empty(0, dtype=np.uint8)

    def write(self, state: WeightState) -> dict[str, Any]:
        """Copy all tensors in, and describe them in plain values. Raises WeightError: no memory for them."""
        table, size = content_table(state)
        try:
            content = self._reserved(size)
        except (OSError, ValueError) as error:
            raise WeightError(f"no shared memory for the {size} bytes of version {state.weight_version}") from error
        write_content(state, table, [content.data] if size else [])
        return {"path": f"/proc/{os.getpid()}/fd/{self._fd}", "size": size, "tensors": table_rows(table)}

    def close(self) -> None:
        """Give the memory back. Safe to call twice."""
        self._content = np.empty(0, dtype=np.uint8)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _reserved(self, size: int) -> npt.NDArray[np.uint8]:
        if len(self._content) < size:
            os.posix_fallocate(self._fd, 0, size)
            self._content = map_memory(self._fd, size)
        return self._content[:size]


class SharedReader:
    """The reader's side. Keeps the segment mapped: fresh pages cost as much again as a copy."""

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self._key: tuple[str, int, int] | None = None

    def read(self, description: Mapping[str, Any]) -> Iterator[tuple[TensorEntry, memoryview]]:
        """Each tensor and its bytes. Raises WeightError: no such segment, or tensors beyond its end."""
        segment = memoryview(self._mapped(str(description["path"]), int(description["size"])))
        try:
            table = read_table(description["tensors"])
        except TypeError as error:
            raise WeightError(f"what is said of the shared weights makes no sense: {error}") from error
        for entry in table:
            end = entry.offset + entry.num_bytes
            if end > len(segment):
                raise WeightError(f"{entry.name} lies outside of the shared memory of {len(segment)} bytes")
            yield entry, segment[entry.offset : end]

    def close(self) -> None:
        """Forget the segment; it is unmapped when the last tensor of it has gone."""
        self._map, self._key = None, None

    def _mapped(self, path: str, size: int) -> mmap.mmap:
        try:
            with open(path, "r+b") as file:
                status = os.fstat(file.fileno())
                key = (path, status.st_ino, status.st_size)
                if self._map is None or self._key != key:
                    self._map, self._key = mmap.mmap(file.fileno(), status.st_size), key
        except (OSError, ValueError) as error:
            raise WeightError(f"the shared weights at {path} cannot be mapped: {error}") from error
        if len(self._map) < size:
            raise WeightError(f"the shared weights at {path} have {len(self._map)} bytes, not {size}")
        return self._map
