"""Host buffers of one size that are used again once nobody looks at them any more.

In: a size. Out: writable memoryviews. Fresh pages cost several times a copy, so a buffer comes
back when the last view of it has gone, whoever held it; it is never taken from a holder.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Protocol

import numpy as np
import numpy.typing as npt


class Pool(Protocol):
    """Lends buffers of one size."""

    buffer_bytes: int

    def borrow(self) -> memoryview:
        """A buffer with arbitrary content. Views and slices of the memoryview keep it lent."""


class BufferPool:
    """Lends buffers of `buffer_bytes`; at most `max_free` wait for their next use."""

    def __init__(self, buffer_bytes: int, *, max_free: int = 1) -> None:
        self.buffer_bytes = buffer_bytes
        self.max_free = max_free
        # A deque, not a lock: buffers come back from whichever thread drops the last view, even
        # out of a garbage collection inside `borrow`.
        self._free: deque[npt.NDArray[np.uint8]] = deque(maxlen=max_free)

    def borrow(self) -> memoryview:
        """A buffer with arbitrary content. Views and slices of the memoryview keep it lent."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = np.empty(self.buffer_bytes, dtype=np.uint8)
        loan = buffer.view()
        weakref.finalize(loan, self._free.append, buffer).atexit = False
        return loan.data
