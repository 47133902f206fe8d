"""Host buffers of one size that are used again once nobody looks at them any more.

In: a size. Out: writable memoryviews. Fresh pages cost several times a copy, so a buffer comes
back when the last view of it has gone, whoever held it; it is never taken from a holder.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Protocol

import numpy as np
import numpy.typing as npt

_PAGE_BYTES = 4096
_PAGES_AT_ONCE = 1024


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


class Warming:
    """Touches the pages of a buffer that will be needed, in a thread, until it is. The loan ends with it."""

    def __init__(self, loan: memoryview) -> None:
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._touch, args=(loan,), name="fresh-pages", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop soon, wherever it is, and give the buffer back. Safe to call twice."""
        self._is_over.set()
        self._thread.join()

    def _touch(self, loan: memoryview) -> None:
        pages = np.frombuffer(loan, dtype=np.uint8)[::_PAGE_BYTES]
        for start in range(0, len(pages), _PAGES_AT_ONCE):
            if self._is_over.is_set():
                return
            pages[start : start + _PAGES_AT_ONCE] = 0
