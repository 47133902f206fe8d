"""Versions in memory that all processes of one user on one machine can map.

In: contents, written by the one process that receives them. Out: the same bytes in every other. A
buffer is written again only when no process reads it any more: who reads it holds a lock on it that
ends with the process. It has no name in any file system and is gone with its last user.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.errors import WeightError
from pipeline.weights.meeting import lock
from pipeline.weights.memfd import create_memory, map_memory


class HostBuffer:
    """One buffer of the process that receives."""

    def __init__(self, num_bytes: int) -> None:
        try:
            self.fd = create_memory(num_bytes)
            self._bytes = map_memory(self.fd, num_bytes)
        except (OSError, ValueError) as error:
            raise MemoryError(f"no shared memory for {num_bytes} bytes: {error}") from error
        self._close = weakref.finalize(self, os.close, self.fd)
        self._is_lent = False

    @property
    def address(self) -> int:
        """Where it begins in this process."""
        return int(self._bytes.ctypes.data)

    def take(self) -> memoryview | None:
        """All of it, to be written; None while somebody looks at it, here or elsewhere."""
        if self._is_lent or not lock(self.fd, fcntl.LOCK_EX):
            return None
        self._is_lent = True
        loan = self._bytes.view()
        weakref.finalize(loan, self._give_back).atexit = False
        return loan.data

    def _give_back(self) -> None:
        self._is_lent = False
        if self._close.alive:
            fcntl.flock(self.fd, fcntl.LOCK_UN)


class HostPool:
    """Lends buffers of `buffer_bytes`, as `BufferPool` does, that other processes can map once they are written."""

    def __init__(self, buffer_bytes: int) -> None:
        self.buffer_bytes = buffer_bytes
        self._buffers: list[HostBuffer] = []

    def borrow(self) -> memoryview:
        """A buffer with arbitrary content. Raises MemoryError."""
        for buffer in self._buffers:
            if (loan := buffer.take()) is not None:
                return loan
        self._buffers.append(HostBuffer(self.buffer_bytes))
        loan = self._buffers[-1].take()
        assert loan is not None
        return loan

    def share(self, loan: memoryview) -> dict[str, Any]:
        """Let others map what was borrowed and written; says where it is."""
        address = np.frombuffer(loan, dtype=np.uint8).ctypes.data if len(loan) else None
        for buffer in self._buffers:
            if address in {None, buffer.address}:
                fcntl.flock(buffer.fd, fcntl.LOCK_SH)
                return _place(buffer.fd)
        raise ValueError("not a buffer of this pool")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """What another process has written. place: where others find it too, as long as a view of `buffer` is left."""

    buffer: memoryview
    place: dict[str, Any]


def map_shared(place: Mapping[str, Any], num_bytes: int) -> Mapped | None:
    """What `HostPool.share` told of, for reading; None where it is gone or about to be written again.

    It stays as it is until the last view of it has gone. Raises WeightError where it is too short.
    """
    try:
        fd = os.open(str(place["path"]), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    if os.fstat(fd).st_ino != place["file"] or not lock(fd, fcntl.LOCK_SH):
        os.close(fd)
        return None
    try:
        mapped = map_memory(fd, num_bytes)
    except (OSError, ValueError) as error:
        os.close(fd)
        raise WeightError(f"shared weights of {num_bytes} bytes cannot be mapped: {error}") from error
    loan = mapped.view()
    weakref.finalize(loan, os.close, fd)
    return Mapped(buffer=loan.data, place=_place(fd))


def _place(fd: int) -> dict[str, Any]:
    return {"path": f"/proc/{os.getpid()}/fd/{fd}", "file": os.fstat(fd).st_ino}
