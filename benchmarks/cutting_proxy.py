"""A stretch of network that breaks once, and counts what crosses it.

In: where the publisher's pieces come from. Out: an address in front of it, and bytes before and after the cut.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlparse

_CHUNK_BYTES = 65536


class CuttingProxy:
    """cut_at: bytes from the publisher after which the connection is cut, once.

    num_before, num_after: bytes from the publisher before and after that.
    """

    def __init__(self, target: str, cut_at: int) -> None:
        where = urlparse(target)
        self._target = (where.hostname, where.port)
        self._cut_at = cut_at
        self._is_cut = False
        self.num_before = self.num_after = 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections; those that are end with either side."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            for source, sink, is_watched in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._pump, args=(source, sink, is_watched), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_watched: bool) -> None:
        with suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                sink.sendall(data[: self._room(len(data))] if is_watched else data)
                if is_watched and self._has_to_cut():
                    break
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _room(self, num_bytes: int) -> int:
        """How many of so many bytes may pass; they are counted."""
        if self._is_cut:
            self.num_after += num_bytes
            return num_bytes
        passing = min(num_bytes, self._cut_at - self.num_before)
        self.num_before += passing
        return passing

    def _has_to_cut(self) -> bool:
        if self._is_cut or self.num_before < self._cut_at:
            return False
        self._is_cut = True
        return True


@contextmanager
def cutting_proxy(target: str, cut_at: int) -> Iterator[CuttingProxy]:
    """A proxy that runs."""
    proxy = CuttingProxy(target, cut_at)
    try:
        yield proxy
    finally:
        proxy.close()
