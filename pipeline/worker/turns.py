"""One device for generation and training: who may use it, and the ways to leave it.

In: a worker of a colocated run. Out: its turn on the device, which no other worker has meanwhile. The
trainer asks when it has a batch to train; the generator has the device for all the rest of the time.
In a disaggregated run each has a device of its own, and all of this does nothing.

    generator   generates, applies weights ........ sleeps        wakes .......
    turn        |------------ generator -----------|- trainer ----|- generator -
    trainer     collects a batch ....... asks ----> takes, steps, leaves the device
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from pipeline.engines import GenerationEngine, SleepingEngine
from pipeline.worker.context import WorkerContext

_LOOK_EVERY_S = 0.05
_GIVE_TIMEOUT_S = 2.0


class DeviceTurn:
    """A worker's turn on the device. is_urgent: whoever has it is to give it up at once, not when idle."""

    def __init__(self, context: WorkerContext, *, is_urgent: bool = False) -> None:
        self.is_shared = context.config.is_colocated
        self._context = context
        self._wish = "urgent" if is_urgent else "idle"
        self._others_wish = "held"
        self._keeping: asyncio.Task[None] | None = None

    def must_be_given(self, *, is_idle: bool) -> bool:
        """Whether another worker waits for it. Also where it was lost, to one who believed that we had died."""
        return self._others_wish in {"urgent", ""} or (is_idle and self._others_wish == "idle")

    async def take(self) -> None:
        """Wait for it, as long as it takes, and keep it until it is given."""
        if not self.is_shared:
            return
        started = time.monotonic()
        if self._wish == "urgent":
            self._context.waiting_for("the device, which a generator has")
        while not await self._ask("take"):  # noqa: ASYNC110  it is in Redis
            await asyncio.sleep(_LOOK_EVERY_S)
        if self._wish == "urgent":
            self._context.waiting_for(None)
        waited_s = time.monotonic() - started
        self._context.metrics.device_wait_seconds_total.inc(waited_s)
        self._context.log.debug("device_taken", waited_s=round(waited_s, 4))
        self._others_wish = "held"
        self._keeping = asyncio.create_task(self._keep(), name="device-turn")

    async def give(self) -> None:
        """Let another worker have it. Safe without having it; without Redis it expires by itself."""
        if not self.is_shared:
            return
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            self._context.log.debug("device_given")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GIVE_TIMEOUT_S):
                await self._ask("give")

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Have it for the block."""
        await self.take()
        try:
            yield
        finally:
            await self.give()

    async def _keep(self) -> None:
        try:
            while self._others_wish:
                await asyncio.sleep(_LOOK_EVERY_S)
                self._others_wish = await self._ask("keep")
        except Exception:
            self._others_wish = ""  # nobody renews it any more, so it will be another's
            raise
        self._context.log.error("device_lost", reason="this worker stood still for longer than queues.lease_s")

    async def _ask(self, how: str) -> str:
        context = self._context
        return await context.fleet.device_turn(context.worker_id, context.config.queues.lease_s, how, self._wish)


class Alternation:
    """The generator's side: its engine sleeps while another worker has the device.

    awake: to be held by whoever needs the engine awake; taken while it sleeps, as is_asleep says. It begins
    with the turn.
    """

    def __init__(self, turn: DeviceTurn, engine: GenerationEngine) -> None:
        self.awake = asyncio.Lock()
        self.is_asleep = False
        self._turn = turn
        self._engine = engine

    async def run(self) -> None:
        """Give the device up when it is wanted, and come back; for ever. Cancel it."""
        if not self._turn.is_shared:
            return
        assert isinstance(self._engine, SleepingEngine)
        while True:
            while not self._is_wanted():  # noqa: ASYNC110  it is in Redis
                await asyncio.sleep(_LOOK_EVERY_S)
            async with self.awake:
                self.is_asleep = True
                await self._engine.sleep()
                await self._turn.give()
                await self._turn.take()
                await self._engine.wake_up()
                self.is_asleep = False

    def _is_wanted(self) -> bool:
        return self._turn.must_be_given(is_idle=self._engine.num_unfinished_seqs == 0)
