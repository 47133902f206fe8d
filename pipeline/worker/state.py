"""What a worker is doing at this moment, for whoever asks: heartbeat, HTTP endpoints, its own log.

In: notes from the worker's loop. Out: one consistent description. It never blocks and holds no
connection, so that it can be read from any thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum
from typing import TypeVar

from pipeline.fleet import Control
from pipeline.json_values import plain_json
from pipeline.messages import Json
from pipeline.roster import WaitCause

# The loop says that it turns twice a second; after this long without a word it counts as stuck.
_STUCK_AFTER_S = 10.0
_NEWS = "step"
REDIS = "Redis"

Result = TypeVar("Result")


class Activity(StrEnum):
    """The one word for what a worker does."""

    STARTING = "starting"
    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    DRAINING = "draining"


class WorkerState:
    """Notes of one worker.

    changed: set when something happened that others should soon hear. heard: set at every answer
    to a heartbeat. pages: what it serves beside its health, see `HealthServer`.
    """

    def __init__(self, role: str, worker_id: str) -> None:
        self.role = role
        self.worker_id = worker_id
        self.control = Control()
        self.draining = asyncio.Event()
        self.changed = asyncio.Event()
        self.heard = asyncio.Event()
        self.fields: dict[str, Json] = {}
        self.pages: dict[str, Callable[[], Json]] = {}
        self.is_ready = False
        self.outage: str | None = None
        self._wait: str | None = None
        self._wait_cause = WaitCause.OTHER
        self._busy_with: str | None = None
        self._busy_since = 0.0
        self._waiting_since = 0.0
        self._turned_at = time.monotonic()

    @property
    def activity(self) -> Activity:
        """The strongest of what holds now."""
        if self.draining.is_set():
            return Activity.DRAINING
        if self.control.paused:
            return Activity.PAUSED
        if self.waiting_for is not None:
            return Activity.WAITING
        return Activity.RUNNING if self.is_ready else Activity.STARTING

    @property
    def waited_s(self) -> float:
        """Since the wait began; 0 when there is none."""
        return 0.0 if self.waiting_for is None else time.monotonic() - self._waiting_since

    @property
    def waiting_for(self) -> str | None:
        """What the worker waits for; an outage of Redis goes before all else."""
        return self.outage or self._wait

    @property
    def wait_cause(self) -> WaitCause | None:
        """What kind of thing that is; None when nothing is waited for."""
        if self.outage is not None:
            return WaitCause.REDIS
        return None if self._wait is None else self._wait_cause

    def wait_for(self, what: str | None, cause: WaitCause = WaitCause.OTHER) -> None:
        """Note what is waited for; None ends the wait. Another text continues the same wait."""
        self._wait_cause = cause
        self._note_wait(self.outage, what)

    def miss_redis(self, why: str | None) -> None:
        """Note that Redis is away, and why; None when it is back."""
        self._note_wait(None if why is None else f"{REDIS} ({why})", self._wait)

    def _note_wait(self, outage: str | None, what: str | None) -> None:
        was_waiting = self.waiting_for is not None
        self.outage, self._wait = outage, what
        if (self.waiting_for is not None) != was_waiting:
            self._waiting_since = time.monotonic()
            self.changed.set()

    def be_busy(self, what: str | None) -> None:
        """Note one long piece of work, in which nothing else moves; None ends it."""
        self._busy_with, self._busy_since = what, time.monotonic()

    def set_ready(self, is_ready: bool) -> None:
        """Note whether the worker can do its work."""
        if is_ready != self.is_ready:
            self.is_ready = is_ready
            self.changed.set()

    def drain(self) -> None:
        """Ask the worker to end."""
        self.draining.set()
        self.changed.set()

    def note(self, fields: Mapping[str, object]) -> None:
        """Keep what the worker says of itself, as JSON values. A step that is done is news."""
        before = self.fields.get(_NEWS)
        self.fields.update({name: plain_json(value) for name, value in fields.items()})
        if self.fields.get(_NEWS) != before:
            self.changed.set()

    def turned(self) -> None:
        """The event loop goes round."""
        self._turned_at = time.monotonic()

    def is_live(self) -> bool:
        """False when the event loop has been stuck for long."""
        return time.monotonic() - self._turned_at < _STUCK_AFTER_S

    def can_work(self) -> bool:
        """Whether the worker is ready and not about to leave."""
        return self.is_ready and not self.draining.is_set()

    async def wait_for_any(self, *events: asyncio.Event, timeout_s: float | None = None) -> None:
        """Until one of the events is set, the worker drains, or time is up."""
        waited = (*events, self.draining)
        if any(event.is_set() for event in waited):
            return
        tasks = [asyncio.ensure_future(event.wait()) for event in waited]
        try:
            await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    async def unless_draining(self, work: Awaitable[Result]) -> Result | None:
        """The result of `work`; None when the worker drains first, and then `work` is cancelled."""
        task = asyncio.ensure_future(work)
        drain = asyncio.ensure_future(self.draining.wait())
        try:
            await asyncio.wait([task, drain], return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            drain.cancel()
            task.cancel()
            await asyncio.wait([task])

    def describe(self) -> dict[str, Json]:
        """For /healthz, /readyz and the registry."""
        return {
            "role": self.role,
            "worker": self.worker_id,
            "state": self.activity.value,
            "ready": self.can_work(),
            "waiting_for": self.waiting_for,
            "wait_cause": self.wait_cause,
            "waited_s": round(self.waited_s, 1),
            "busy_with": self._busy_with,
            "busy_s": round(time.monotonic() - self._busy_since, 1) if self._busy_with else 0.0,
        }
