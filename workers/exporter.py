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
from pipeline.run.limits import Limit
from pipeline.run.metrics import RunCollector
from pipeline.run.status import collect
from pipeline.worker.lifecycle import WorkerContext, run_worker

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger

TARGETS = "/targets"
_LONGEST_READ_S = 5.0
_BLOCKED_WORD_AFTER_S, _BLOCKED_REPEAT_S = 15.0, 60.0


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


async def body(context: WorkerContext) -> None:
    """Read and show until drained."""
    collector = RunCollector(context.config.run.name)
    context.metrics.registry.register(collector)
    context.state.pages[TARGETS] = collector.targets
    watch = BlockedWatch(context.log)
    while not context.draining.is_set():
        started = time.monotonic()
        try:
            async with asyncio.timeout(_LONGEST_READ_S):
                status = await collect(context.redis, context.keys)
        except (RedisError, OSError):
            collector.show(None)
            context.set_ready(False)
        else:
            collector.show(status, read_s=time.monotonic() - started)
            context.set_ready(True)
            watch.look(status.limit, time.monotonic())
        await context.wait_for_any(timeout_s=context.config.exporter.interval_s)


def main(config: Config) -> int:
    """Exit code of an exporter process."""
    return run_worker("exporter", config, body, joins=False)
