"""The stretch of network between trainer and generators, to be cut and mended.

In: a run whose trainer advertises an address of the loopback network that nobody listens at. Out:
listeners there that forward to where the trainer really is. Whoever trains next is followed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlparse

from pipeline.fleet import Fleet
from pipeline.messages import Endpoints
from tests.weights.proxy import Proxy

_LOOK_EVERY_S = 0.05
HOST = "127.0.0.1"


class Stretch:
    """advertised: the address that generators connect to."""

    def __init__(self, fleet: Fleet, advertised: str) -> None:
        self.advertised = advertised
        self.num_cuts = 0
        self._fleet = fleet
        self._seen: Endpoints | None = None
        self._open: list[tuple[Proxy, asyncio.Server]] = []
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
            await self._close()
            if not self._is_cut:
                await self._listen()

    async def _listen(self) -> None:
        if self._seen is None:
            return
        for address in (self._seen.announce, self._seen.tiles):
            port = urlparse(address).port
            proxy = Proxy(f"tcp://{HOST}:{port}")
            self._open.append((proxy, await asyncio.start_server(proxy.serve, self.advertised, port)))

    async def _close(self) -> None:
        opened, self._open = self._open, []
        for proxy, server in opened:
            server.close()
            await proxy.stop()
            await server.wait_closed()


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
