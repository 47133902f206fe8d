"""Weights in memory that another process of this machine can map.

In: a `WeightState`. Out: a small description of where its tensors lie, and in the other process
the tensors themselves, without a copy. The memory belongs to the writer and has no name in any
file system: when the writer ends, however it ends, nothing of it is left.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.errors import WeightError
from pipeline.weights import WeightState

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTensor:
    """Where one tensor lies. dtype: torch's name. offset, num_bytes: in the segment."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class SharedWeights:
    """One segment, written again and again. A reader may map it until the next `write`."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("rollstream-weights", os.MFD_CLOEXEC)
        self._map: mmap.mmap | None = None

    def write(self, state: WeightState) -> dict[str, Any]:
        """Copy all tensors in, and describe them in plain values. Raises WeightError: no memory for them."""
        tensors, size = _layout(state)
        try:
            segment = self._reserved(size)
        except (OSError, ValueError) as error:
            raise WeightError(f"no shared memory for the {size} bytes of version {state.weight_version}") from error
        for tensor in tensors:
            segment[tensor.offset : tensor.offset + tensor.num_bytes] = state.tensors[tensor.name].data.cast("B")
        rows = [[item.name, item.dtype, list(item.shape), item.offset, item.num_bytes] for item in tensors]
        return {"path": f"/proc/{os.getpid()}/fd/{self._fd}", "size": size, "tensors": rows}

    def close(self) -> None:
        """Give the memory back. Safe to call twice."""
        if self._map is not None:
            self._map.close()
            self._map = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _reserved(self, size: int) -> mmap.mmap:
        if self._map is None or len(self._map) < size:
            os.posix_fallocate(self._fd, 0, max(size, 1))
            if self._map is not None:
                self._map.close()
            self._map = mmap.mmap(self._fd, max(size, 1))
        return self._map


class SharedReader:
    """The reader's side. Keeps the segment mapped: fresh pages cost as much again as a copy."""

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self._key: tuple[str, int, int] | None = None

    def read(self, description: Mapping[str, Any]) -> Iterator[tuple[SharedTensor, memoryview]]:
        """Each tensor and its bytes. Raises WeightError: no such segment, or tensors beyond its end."""
        segment = memoryview(self._mapped(str(description["path"]), int(description["size"])))
        for name, dtype, shape, offset, num_bytes in description["tensors"]:
            if not 0 <= offset <= offset + num_bytes <= len(segment):
                raise WeightError(f"{name} lies outside of the shared memory of {len(segment)} bytes")
            tensor = SharedTensor(name=name, dtype=dtype, shape=tuple(shape), offset=offset, num_bytes=num_bytes)
            yield tensor, segment[offset : offset + num_bytes]

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


def _layout(state: WeightState) -> tuple[list[SharedTensor], int]:
    tensors: list[SharedTensor] = []
    end = 0
    for name, tensor in state.tensors.items():
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = offset + tensor.data.nbytes
        tensors.append(
            SharedTensor(name=name, dtype=tensor.dtype, shape=tensor.shape, offset=offset, num_bytes=tensor.data.nbytes)
        )
    return tensors, end
