"""The stretch of network between trainer and generators, to be cut and mended.

In: a run whose trainer advertises an address of the loopback network that nobody listens at. Out:
listeners there that forward to where the trainer really is. Whoever trains next is followed.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlparse

from pipeline.fleet import Fleet
from pipeline.messages import Endpoints

_LOOK_EVERY_S = 0.05
_CHUNK_BYTES = 65536
_TRAINER = "127.0.0.1"


class Way:
    """Forwards from `host`:`port` to the trainer's port of the same number, by threads, until it is closed."""

    def __init__(self, host: str, port: int) -> None:
        self._port = port
        self._listener = socket.create_server((host, port))
        self._ends: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self._lock = threading.Lock()
        self._start(self._accept)

    def close(self) -> None:
        """Connections end, and new ones are refused."""
        with self._lock:
            self._is_closed = True
            for end in [self._listener, *self._ends]:
                _end(end)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _start(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._join(near)

    def _join(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection((_TRAINER, self._port))
        except OSError:  # nobody is there any more
            near.close()
            return
        with self._lock:
            if self._is_closed:
                near.close()
                far.close()
                return
            self._ends |= {near, far}
        self._start(self._connection, near, far)

    def _connection(self, near: socket.socket, far: socket.socket) -> None:
        """Both directions, until one ends."""
        back = threading.Thread(target=_pump, args=(far, near), daemon=True)
        back.start()
        _pump(near, far)
        back.join()
        with self._lock:
            self._ends -= {near, far}
        near.close()
        far.close()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(_CHUNK_BYTES):
            sink.sendall(data)
    _end(source)
    _end(sink)


def _end(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


class Stretch:
    """advertised: the address that generators connect to."""

    def __init__(self, fleet: Fleet, advertised: str) -> None:
        self.advertised = advertised
        self.num_cuts = 0
        self._fleet = fleet
        self._seen: Endpoints | None = None
        self._ways: list[Way] = []
        self._is_cut = False
        self._one_at_a_time = asyncio.Lock()

    async def follow(self) -> None:
        """Listen wherever the present trainer advertises itself; never returns."""
        while True:
            endpoints = await self._fleet.endpoints()
            if endpoints is not None and endpoints != self._seen:
                self._seen = endpoints
                await self._open_or_close()
            await asyncio.sleep(_LOOK_EVERY_S)

    async def cut(self) -> None:
        """Connections end, and new ones are refused."""
        self._is_cut = True
        self.num_cuts += 1
        await self._open_or_close()

    async def mend(self) -> None:
        """Connections are accepted again."""
        self._is_cut = False
        await self._open_or_close()

    async def close(self) -> None:
        """For good."""
        self._is_cut = True
        await self._open_or_close()

    async def _open_or_close(self) -> None:
        async with self._one_at_a_time:
            closed, self._ways = self._ways, []
            for way in closed:
                await asyncio.to_thread(way.close)
            if self._seen is None or self._is_cut:
                return
            ports = [urlparse(address).port for address in (self._seen.announce, self._seen.tiles)]
            self._ways = [Way(self.advertised, port) for port in ports if port]


@asynccontextmanager
async def stretch(fleet: Fleet, advertised: str) -> AsyncIterator[Stretch]:
    """A stretch that follows the trainer."""
    network = Stretch(fleet, advertised)
    following = asyncio.create_task(network.follow())
    try:
        yield network
    finally:
        following.cancel()
        (ended,) = await asyncio.gather(following, return_exceptions=True)
        await network.close()
        assert isinstance(ended, asyncio.CancelledError), ended
