"""A server with an append-only file that can be killed, and comes back with what it had."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import redis

from pipeline.embedded import EmbeddedServer


class MortalServer:
    """Valkey on a unix socket in `folder`. Every write is on disk before it is answered."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server = self._start()

    @property
    def url(self) -> str:
        """The same in every life."""
        return self._server.url

    async def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        os.kill(self._pid, signal.SIGKILL)
        while not self._server.has_ended():  # noqa: ASYNC110  another process sets no event
            await asyncio.sleep(0.01)
        self._server.stop()  # closes what is left of it here

    async def restart(self) -> None:
        """Returns when it answers again."""
        self._server = await asyncio.to_thread(self._start)

    def freeze(self) -> None:
        """It answers nothing."""
        os.kill(self._pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """It goes on."""
        os.kill(self._pid, signal.SIGCONT)

    def stop(self) -> None:
        """End it."""
        self._server.stop()

    def _start(self) -> EmbeddedServer:
        server = EmbeddedServer.start(self._folder, persist=True)
        with redis.Redis.from_url(server.url) as client:
            self._pid = int(client.info("server")["process_id"])
        return server
