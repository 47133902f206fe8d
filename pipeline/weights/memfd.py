"""Memory without a name that several processes can map; it is gone with the last of them, however they end."""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt


def create_memory(num_bytes: int) -> int:
    """A file descriptor of new memory, all zeros, not inherited. Raises OSError where there is none."""
    fd = os.memfd_create("rollstream-weights", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, max(num_bytes, 1))
    except OSError:
        os.close(fd)
        raise
    return fd


def map_memory(fd: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    """Its first bytes, writable; they stay mapped until the last view of them has gone. Raises OSError, ValueError."""
    return np.frombuffer(mmap.mmap(fd, max(num_bytes, 1)), dtype=np.uint8)[:num_bytes]
