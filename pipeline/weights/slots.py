"""Memory that a trainer writes a version into and another process serves it from, without a copy.

In: sizes. Out: numbered slots of shared memory, the same in both processes. They have no name in any
file system: when both processes have ended, however they ended, nothing of them is left.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

from pipeline.errors import WeightError
from pipeline.weights.memfd import create_memory, map_memory


class Slot:
    """One stretch of shared memory. fd: the receiver's to close."""

    def __init__(self, number: int, fd: int, num_bytes: int) -> None:
        self.number = number
        self.num_bytes = num_bytes
        self.fd = fd
        self._bytes = map_memory(fd, num_bytes)

    @classmethod
    def create(cls, number: int, num_bytes: int) -> Slot:
        """New memory, all zeros. Raises WeightError where there is none."""
        try:
            return cls(number, create_memory(num_bytes), num_bytes)
        except (OSError, ValueError) as error:
            raise WeightError(f"no shared memory for the {num_bytes} bytes of a version: {error}") from error

    def content(self, num_bytes: int) -> memoryview:
        """The first bytes, to be written."""
        return self._bytes[:num_bytes].data

    def lend(self, num_bytes: int, on_return: Callable[[int], object]) -> memoryview:
        """The same for a reader; `on_return(number)` is called once when the last view of it has gone."""
        loan = self._bytes[:num_bytes].view()
        weakref.finalize(loan, on_return, self.number).atexit = False
        return loan.data

    def close(self) -> None:
        """Close the file; the memory goes with the last view."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
