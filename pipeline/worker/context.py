"""What the body of a worker is given: its parts, already connected, and a few ways to wait.

In: what `pipeline.worker.lifecycle` has built. Out: one object for the loop of a generator, scorer,
trainer or exporter. It starts and ends nothing itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from pipeline import startup
from pipeline.config import Config
from pipeline.fleet import Fleet
from pipeline.keys import Keys
from pipeline.metrics import Metrics
from pipeline.queues.leases import LeaseKeeper
from pipeline.roster import WaitCause
from pipeline.streams import Streams
from pipeline.worker.state import WorkerState

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from structlog.stdlib import BoundLogger

Result = TypeVar("Result")
# A trainer that was killed is followed within ten seconds; one that is only slow has some beats to miss.
_TRAINER_BEATS, _SHORTEST_TERM_S = 4, 1.0


@dataclass(kw_only=True)
class WorkerContext:
    """Parts of one worker.

    worker_id: also its consumer name in the streams. run_id: changes only when Redis lost the run.
    keeper: renews the leases it is given. holds_trainer_lock: the heartbeat renews it.
    """

    config: Config
    role: str
    worker_id: str
    run_id: str
    redis: Redis
    keys: Keys
    streams: Streams
    keeper: LeaseKeeper
    fleet: Fleet
    metrics: Metrics
    log: BoundLogger
    state: WorkerState
    address: str
    holds_trainer_lock: bool = False

    @property
    def draining(self) -> asyncio.Event:
        """Set once: claim nothing more, finish or hand back what is held, return."""
        return self.state.draining

    @property
    def trainer_term_s(self) -> float:
        """How long the right to train lasts without a sign of life: some heartbeats, at most a lease."""
        settings = self.config
        return min(settings.queues.lease_s, max(_TRAINER_BEATS * settings.worker.heartbeat_s, _SHORTEST_TERM_S))

    @property
    def is_paused(self) -> bool:
        """Whether the run is paused: claim nothing new."""
        return self.state.control.paused

    @property
    def run_version(self) -> int | None:
        """Newest weight version of the run, as of the last heartbeat."""
        return self.state.control.weight_version

    def set_status(self, **fields: object) -> None:
        """Say something of this worker that `rollstream status` shows with the next heartbeat."""
        self.state.note(fields)

    def set_ready(self, is_ready: bool) -> None:
        """Say whether the worker can do its work: /readyz, and a service that routes by it."""
        if is_ready:
            startup.settle()
        self.state.set_ready(is_ready)

    def waiting_for(self, what: str | None, cause: WaitCause = WaitCause.OTHER) -> None:
        """Say what is waited for, and what kind of thing it is; None when the wait is over.

        The log says it soon, then ever more seldom, and `rollstream status` shows it.
        """
        self.state.wait_for(what, cause)

    @contextlib.contextmanager
    def busy_with(self, what: str) -> Iterator[None]:
        """Say that the block is one long piece of work: that nothing moves meanwhile is no standstill."""
        self.state.be_busy(what)
        try:
            yield
        finally:
            self.state.be_busy(None)

    def keep_trainer_lock(self) -> None:
        """From now on the heartbeat renews the trainer's lock, and the worker fails if it is lost.

        What it asks of the streams is refused from the moment that another holds it, heartbeat or not.
        """
        self.holds_trainer_lock = True
        self.streams.fence = self.worker_id

    async def wait_for_any(self, *events: asyncio.Event, timeout_s: float | None = None) -> None:
        """Until one of the events is set, the worker drains, or time is up."""
        await self.state.wait_for_any(*events, timeout_s=timeout_s)

    async def unless_draining(self, work: Awaitable[Result]) -> Result | None:
        """The result of `work`; None when the worker drains first, and then `work` is cancelled."""
        return await self.state.unless_draining(work)

    async def wait_while_paused(self) -> None:
        """Returns when the run is not paused, or the worker drains."""
        while self.is_paused and not self.draining.is_set():
            started = time.monotonic()
            self.state.heard.clear()
            await self.wait_for_any(self.state.heard)
            self.metrics.idle_seconds_total.labels(cause="paused").inc(time.monotonic() - started)
