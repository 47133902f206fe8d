"""Columns of bytes, compressed where that makes them smaller, and back.

In: bytes whose length the reader will know. Out: zstd frames. What is unpacked never takes more
memory than the length that was asked for, whatever a frame claims; what is wrong with one raises
`WeightError`.
"""

from __future__ import annotations

import threading

import numpy as np
import zstandard
from numpy.typing import NDArray

from pipeline.errors import WeightError

# What zstd spends on a window at the least, also where the content is smaller.
_MIN_WINDOW_BYTES = 1024


class _Zstd(threading.local):
    """A compressor and a decompressor for each thread: they keep their tables, and are not for two at once."""

    def __init__(self) -> None:
        # Level 1 as it is for large inputs. For small ones it would look for matches of 5 bytes, which are chance
        # in columns of noise and cost more than entropy coding alone.
        parameters = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, write_content_size=True)
        self.compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self.decompressor = zstandard.ZstdDecompressor()


_ZSTD = _Zstd()


def compress(data: NDArray[np.uint8]) -> bytes:
    """One zstd frame that says how long its content is. Releases the GIL."""
    return _ZSTD.compressor.compress(data.data)


def decompress(frame: memoryview, num_bytes: int) -> bytes:
    """The content of one zstd frame and nothing behind it; WeightError unless it is `num_bytes` long.

    The frame's claims are looked at before anything is allocated: a window or a content larger than
    `num_bytes` is refused. Releases the GIL.
    """
    try:
        claims = zstandard.get_frame_parameters(frame)
        if claims.content_size != num_bytes or claims.window_size > max(num_bytes, _MIN_WINDOW_BYTES):
            raise WeightError(f"a frame claims {claims.content_size} bytes, {num_bytes} belong there")
        return _ZSTD.decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WeightError(f"a frame of {len(frame)} bytes is no zstd: {error}") from error


def pack_column(column: NDArray[np.uint8]) -> bytes:
    """The column: nothing if all its bytes are 0, a frame if that is shorter, else itself."""
    if not column.any():
        return b""
    frame = compress(column)
    return frame if len(frame) < column.size else column.tobytes()


def unpack_column(packed: memoryview, num_bytes: int) -> NDArray[np.uint8]:
    """The column of `num_bytes` that `packed` stands for, perhaps a view. Raises WeightError."""
    if not packed:
        return np.zeros(num_bytes, dtype=np.uint8)
    data = packed if len(packed) == num_bytes else decompress(packed, num_bytes)
    return np.frombuffer(data, dtype=np.uint8)
