"""The heartbeat: a worker's signs of life, and what it hears in return.

In: the worker's notes and counters. Out: a record in the registry every few seconds, and the
worker's `Control`. It outlives any outage of Redis; if it ends, the worker ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import Protocol

from redis.exceptions import RedisError

from pipeline.fleet import Control, WorkerInfo
from pipeline.messages import Json
from pipeline.rates import Rates
from pipeline.worker.context import WorkerContext

_SHORTEST_PATIENCE_S = 2.0
_SOONEST_S = 0.2


class Rejoins(Protocol):
    """Can bring a worker into its run again."""

    async def rejoin(self, context: WorkerContext) -> str:
        """Make what the run needs in Redis; returns the run's id."""


class Heartbeat:
    """Beats for one worker. rejoins: asked when Redis has lost the run."""

    def __init__(self, context: WorkerContext, rejoins: Rejoins) -> None:
        self._context = context
        self._rejoins = rejoins
        self._rates = Rates(context.metrics)
        self._patience_s = max(2 * context.config.worker.heartbeat_s, _SHORTEST_PATIENCE_S)

    async def run(self) -> None:
        """Beat for ever."""
        heartbeat_s = self._context.config.worker.heartbeat_s
        changed = self._context.state.changed
        while True:
            changed.clear()
            await self._beat()
            # News are told at once, but a stream of news makes no stream of beats.
            await asyncio.sleep(min(_SOONEST_S, heartbeat_s))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(heartbeat_s - _SOONEST_S, 0)):
                    await changed.wait()

    async def _beat(self) -> None:
        context = self._context
        try:
            async with asyncio.timeout(self._patience_s):
                control = await context.fleet.beat(self.info())
                await self._renew_lock()
                await self._look_for_run(control)
        except (RedisError, OSError) as error:
            self._note_outage(error)
            return
        if context.state.outage is not None:
            context.state.miss_redis(None)
            context.log.info("redis_back")
        self._obey(control)

    def info(self) -> WorkerInfo:
        """What the registry is told."""
        context = self._context
        fields = context.state.fields
        rates = self._rates.measure(fields.get("tokens_generated"))
        status: dict[str, Json] = {**rates, **fields, **context.state.describe()}
        return WorkerInfo(
            worker_id=context.worker_id,
            role=context.role,
            host=socket.gethostname(),
            pid=os.getpid(),
            address=context.address,
            heartbeat_s=context.config.worker.heartbeat_s,
            status=status,
        )

    async def _renew_lock(self) -> None:
        context = self._context
        if context.holds_trainer_lock:
            await context.fleet.hold_trainer(context.worker_id, context.trainer_term_s)

    async def _look_for_run(self, control: Control) -> None:
        context = self._context
        if not context.run_id or control.run_id == context.run_id:
            return
        lost = context.run_id
        context.run_id = await self._rejoins.rejoin(context)
        context.log.error("run_lost", run_id=lost, new_run_id=context.run_id, why="Redis came back without its data")

    def _note_outage(self, error: Exception) -> None:
        why = str(error) or "no answer"
        if self._context.state.outage is None:
            self._context.metrics.redis_outages_total.inc()
            self._context.log.warning("redis_away", error=why)
        self._context.state.miss_redis(why)

    def _obey(self, control: Control) -> None:
        context, state = self._context, self._context.state
        if control.paused != state.control.paused:
            context.log.info("paused" if control.paused else "resumed")
        state.control = control
        state.heard.set()
        if context.draining.is_set():
            return
        if control.stop_reason is not None:
            context.log.info("run_is_over", reason=control.stop_reason)
            state.drain()
        elif control.drain:
            context.log.info("draining", reason="asked to leave")
            state.drain()
