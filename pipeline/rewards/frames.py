"""What a scorer and its reward processes say to each other: length-prefixed msgpack.

In: plain values. Out: the same values at the other end of a socket. Imports next to nothing,
because every child process pays for it.

    scorer -> child   {number, rewards: [{function, kwargs}], rows: [...], path: [...]}    once
    child  -> scorer  {number, ready: true} or {number, error: text}
    scorer -> child   {number, reward: index, prompt, texts, token_ids, columns}
    child  -> scorer  {number, values: [number, None, {tokens: [number or None]} or {error: text}]}
                      or {number, error: text, detail: traceback}

    `is_useless` beside an error: no other group would fare better.

The number counts what the scorer has asked; an answer carries that of its question.
rows: of the data set, {where, prompt, columns}, for the functions to be tried on; none in a scorer.
"""

from __future__ import annotations

import socket
import struct
from typing import Any, TypeAlias, cast

import msgpack

Frame: TypeAlias = dict[str, Any]
_HEADER = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size


def pack(frame: Frame) -> bytes:
    """A frame with its length in front. Text that is no Unicode, as errors of users may hold, goes as escapes."""
    body = cast(bytes, msgpack.packb(frame, use_bin_type=True, unicode_errors="backslashreplace"))
    return _HEADER.pack(len(body)) + body


def body_length(header: bytes) -> int:
    """Bytes that follow the header."""
    return cast(int, _HEADER.unpack(header)[0])


def unpack(body: bytes) -> Frame:
    """The frame in a body without header."""
    return cast(Frame, msgpack.unpackb(body, raw=False, strict_map_key=False))


def send(sock: socket.socket, frame: Frame) -> None:
    """Write one frame to a blocking socket."""
    sock.sendall(pack(frame))


def receive(sock: socket.socket) -> Frame | None:
    """Read one frame from a blocking socket; None when the other end has closed."""
    header = _receive_exactly(sock, HEADER_BYTES)
    if header is None:
        return None
    body = _receive_exactly(sock, body_length(header))
    return None if body is None else unpack(body)


def _receive_exactly(sock: socket.socket, num_bytes: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < num_bytes:
        part = sock.recv(min(num_bytes - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)
