"""A TCP proxy in front of a publisher that corrupts or cuts what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlparse


class Proxy:
    """Forwards to `target`, a tcp:// address; `address` is its own.

    flip_at: positions in the stream from the publisher, counted over all connections, at which a
    byte is inverted. cut_at: position at which the connection is cut, once.
    """

    def __init__(self, target: str, *, flip_at: tuple[int, ...] = (), cut_at: int | None = None) -> None:
        self.address = ""
        self.num_connections = 0
        self.num_flipped = 0
        self._target = urlparse(target)
        self._flip_at = flip_at
        self._cut_at = cut_at
        self._position = 0
        self._pumps: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        task = asyncio.current_task()
        assert task is not None
        self._pumps.add(task)
        self.num_connections += 1
        there_reader, there_writer = await asyncio.open_connection(self._target.hostname, self._target.port)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, there_writer, spoils=False))
                group.create_task(self._pump(there_reader, writer, spoils=True))
        except* (ConnectionError, EOFError):
            writer.transport.abort()
        finally:
            there_writer.transport.abort()
            writer.transport.abort()
            self._pumps.discard(task)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, spoils: bool) -> None:
        while data := await source.read(65536):
            sink.write(self._spoilt(data) if spoils else data)
            await sink.drain()
        raise EOFError

    def _spoilt(self, data: bytes) -> bytes:
        start, end = self._position, self._position + len(data)
        if self._cut_at is not None and end > self._cut_at:
            self._cut_at = None
            raise ConnectionResetError
        self._position = end
        changed = bytearray(data)
        for position in self._flip_at:
            if start <= position < end:
                changed[position - start] ^= 0xFF
                self.num_flipped += 1
        return bytes(changed)

    async def stop(self) -> None:
        """End all connections."""
        pumps = list(self._pumps)
        for task in pumps:
            task.cancel()
        for task in pumps:
            with suppress(asyncio.CancelledError):
                await task


@asynccontextmanager
async def proxied(target: str, *, flip_at: tuple[int, ...] = (), cut_at: int | None = None) -> AsyncIterator[Proxy]:
    """A running proxy."""
    proxy = Proxy(target, flip_at=flip_at, cut_at=cut_at)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        await proxy.stop()
        await server.wait_closed()
