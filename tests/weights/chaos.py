"""A peer between publisher and subscriber that loses, doubles, reorders and spoils whole messages."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import zmq
import zmq.asyncio

_DELAY_S = 0.002


class Chaos:
    """Forwards between subscribers, who connect to `address`, and a publisher's tiles.

    rate: probability of each fault for each message of the publisher. num_faults: how many there were.
    """

    def __init__(self, context: zmq.asyncio.Context, seed: int, rate: float) -> None:
        self.num_faults = 0
        self._random = random.Random(seed)
        self._rate = rate
        self._front = context.socket(zmq.ROUTER)
        self._front.router_handover = True
        self.address = f"tcp://127.0.0.1:{self._front.bind_to_random_port('tcp://127.0.0.1')}"
        self._context = context
        self._target = ""
        self._backs: dict[bytes, zmq.asyncio.Socket] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def aim(self, target: str) -> None:
        """From now on the publisher is there."""
        self._target = target
        self._hang_up()

    async def run(self) -> None:
        """Forward requests until cancelled."""
        while True:
            peer, *frames = await self._front.recv_multipart()
            if peer not in self._backs:
                back = self._backs[peer] = self._context.socket(zmq.DEALER)
                back.linger = 0
                back.routing_id = peer
                back.connect(self._target)
                self._start(self._answers(peer, back))
            await self._backs[peer].send_multipart(frames)

    async def _answers(self, peer: bytes, back: zmq.asyncio.Socket) -> None:
        while True:
            await self._pass_on(peer, await back.recv_multipart())

    async def _pass_on(self, peer: bytes, frames: list[bytes]) -> None:
        fault = self._random.random() / self._rate
        if fault < 4:
            self.num_faults += 1
        if fault < 1:
            return
        if fault < 2:
            await self._front.send_multipart([peer, *frames])
        elif fault < 3:
            self._start(self._later(peer, frames))
            return
        elif fault < 4:
            place = self._random.randrange(len(frames))
            spoilt = bytearray(frames[place])
            spoilt[self._random.randrange(len(spoilt))] ^= 1 << self._random.randrange(8)
            frames = [*frames[:place], bytes(spoilt), *frames[place + 1 :]]
        await self._front.send_multipart([peer, *frames])

    async def _later(self, peer: bytes, frames: list[bytes]) -> None:
        await asyncio.sleep(_DELAY_S)
        await self._front.send_multipart([peer, *frames])

    def _start(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _hang_up(self) -> None:
        for task in self._tasks:
            task.cancel()
        for back in self._backs.values():
            back.close(linger=0)
        self._backs.clear()

    async def stop(self) -> None:
        """End everything."""
        tasks = list(self._tasks)
        self._hang_up()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._front.close(linger=0)


@asynccontextmanager
async def chaos(seed: int, rate: float) -> AsyncIterator[Chaos]:
    """Chaos that runs."""
    context = zmq.asyncio.Context()
    between = Chaos(context, seed, rate)
    running = asyncio.create_task(between.run())
    try:
        yield between
    finally:
        running.cancel()
        await asyncio.wait([running])
        await between.stop()
        context.term()
