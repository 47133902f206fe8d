"""A way to Redis on which replies get lost, as on a network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

CHUNK = 1 << 20


class LossyWay:
    """Forwards between a socket of its own and the server's. `loses`: the next reply that is no error."""

    def __init__(self, path: Path, server: str) -> None:
        self._server = server
        self._tasks: set[asyncio.Task[None]] = set()
        self.url = f"unix://{path}"
        self.path = path
        self.loses = False
        self.num_lost = 0

    @classmethod
    @asynccontextmanager
    async def open(cls, path: Path, server_url: str) -> AsyncIterator[LossyWay]:
        """Listens on `path` for as long as the block lasts."""
        way = cls(path, server_url.removeprefix("unix://"))
        listener = await asyncio.start_unix_server(way._accept, path)
        try:
            yield way
        finally:
            listener.close()
            for task in way._tasks:
                task.cancel()
            await asyncio.gather(*way._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        upstream_reader, upstream_writer = await asyncio.open_unix_connection(self._server)
        try:
            async with asyncio.TaskGroup() as group:
                there = group.create_task(self._forward(reader, upstream_writer))
                await self._answer(upstream_reader, writer)
                there.cancel()
        finally:
            for end in (writer, upstream_writer):
                end.close()
            self._tasks.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(CHUNK):
            writer.write(chunk)
            await writer.drain()
        writer.write_eof()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(CHUNK):
            if self.loses and not chunk.startswith(b"-"):
                self.loses = False
                self.num_lost += 1
                return
            writer.write(chunk)
            await writer.drain()
