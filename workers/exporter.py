"""The exporter: the run as a whole, for Prometheus and for the log.

In: Redis, read at most every `exporter.interval_s`. Out: gauges of streams, ledger and fleet, the
addresses of all workers for Prometheus, and a warning that names the stage when nothing moves. It
takes no part in the run.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from redis.exceptions import RedisError

from pipeline.config import Config
from pipeline.run.discovery import Targets
from pipeline.run.limits import Limit
from pipeline.run.metrics import RunCollector
from pipeline.run.status import collect
from pipeline.worker.lifecycle import WorkerContext, run_worker

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger

TARGETS = "/targets"
_LONGEST_READ_S = 5.0
_GOODBYE_LOOK_S = 0.5
_BLOCKED_WORD_AFTER_S, _BLOCKED_REPEAT_S = 10.0, 60.0


class BlockedWatch:
    """Says in the log when a run is blocked, and when it no longer is."""

    def __init__(self, log: BoundLogger) -> None:
        self._log = log
        self._since: float | None = None
        self._said_at: float | None = None

    def look(self, limit: Limit, now: float) -> None:
        """Take in what holds the run back at `now`, in monotonic seconds."""
        if not limit.is_blocked:
            if self._said_at is not None:
                self._log.info("run_moves_again")
            self._since = self._said_at = None
            return
        self._since = now if self._since is None else self._since
        is_due = now - self._since >= _BLOCKED_WORD_AFTER_S
        if is_due and (self._said_at is None or now - self._said_at >= _BLOCKED_REPEAT_S):
            self._said_at = now
            self._log.warning("run_blocked", stage=limit.stage, reason=limit.reason, seconds=round(now - self._since))


class Watcher:
    """Reads the run and shows it to whoever asks."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._collector = RunCollector(context.config.run.name)
        self._targets = Targets(context.config.run.name, context.worker_id)
        self._blocked = BlockedWatch(context.log)
        context.metrics.registry.register(self._collector)
        context.state.pages[TARGETS] = self._targets.answer

    async def look(self) -> None:
        """Read once."""
        context, started = self._context, time.monotonic()
        try:
            async with asyncio.timeout(_LONGEST_READ_S):
                status = await collect(context.redis, context.keys)
        except (RedisError, OSError):
            self._collector.show(None)
            self._targets.show(None)
            context.set_ready(False)
            return
        self._collector.show(status, read_s=time.monotonic() - started)
        self._targets.show(status)
        context.set_ready(True)
        self._blocked.look(status.limit, time.monotonic())

    async def leave(self) -> None:
        """Let Prometheus, if it asks here, know of the end before it comes."""
        # The others have said that they leave, too, with their next sign of life.
        others_after_s = self._context.config.worker.heartbeat_s + _GOODBYE_LOOK_S
        end = time.monotonic() + self._targets.leave(others_after_s)
        while time.monotonic() < end and not self._targets.said_goodbye.is_set():
            await self.look()
            await asyncio.to_thread(self._targets.said_goodbye.wait, _GOODBYE_LOOK_S)


async def body(context: WorkerContext) -> None:
    """Read and show until drained."""
    watcher = Watcher(context)
    while not context.draining.is_set():
        await watcher.look()
        await context.wait_for_any(timeout_s=context.config.exporter.interval_s)
    await watcher.leave()


def main(config: Config) -> int:
    """Exit code of an exporter process."""
    return run_worker("exporter", config, body, joins=False)
