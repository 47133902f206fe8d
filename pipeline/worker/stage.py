"""A stage: claims groups from one stream, works on several at once, hands each to the next stream.

In: leases of `source`. Out: entries on the stream after it, or dead letters with the reason. It never keeps
a group that it cannot finish: what fails goes back for another attempt, what is invalid is set
aside, and what is still in flight when a drain ends is released by the worker's shutdown.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from pipeline.errors import EngineLostError, MessageError, RollstreamError, UsageError
from pipeline.keys import Stream
from pipeline.roster import WaitCause
from pipeline.route import next_stream
from pipeline.streams import Entry, Lease, Moved
from pipeline.worker.lifecycle import WorkerContext

_CLAIM_WAIT_S = 1.0
_FULL_RETRY_S = 0.2


class BusyClock:
    """Seconds in which at least one group was in work, however many there were.

    clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = self._mark = clock()
        self._num_in_work = 0
        self.busy_s = 0.0

    def begin(self) -> None:
        """One more group is in work."""
        self.advance()
        self._num_in_work += 1

    def end(self) -> None:
        """One group is done."""
        self.advance()
        self._num_in_work -= 1

    def advance(self) -> None:
        """Count the time since the last call."""
        now = self._clock()
        if self._num_in_work:
            self.busy_s += now - self._mark
        self._mark = now

    @property
    def ratio(self) -> float:
        """Busy share of the time since the start, 0 to 1."""
        return self.busy_s / max(self._mark - self._started, 1e-9)


class HandBack(Exception):
    """Raised by the work for a group that it will not do now; another worker takes it at once.

    partial: what is done of it, to go on from.
    """

    def __init__(self, reason: str, *, partial: bytes | None = None) -> None:
        super().__init__(reason)
        self.partial = partial


class StageWork(Protocol):
    """What a stage does with its groups."""

    def capacity(self) -> int:
        """Groups that can be taken on now; 0 when busy."""

    async def process(self, lease: Lease) -> Entry:
        """The entry for the next stream.

        Raises MessageError for an invalid group, HandBack to leave it to another worker, and any
        other RollstreamError when this attempt failed.
        """


class Stage:
    """Runs `work` on every group of `source` until the worker drains.

    wake: set by the work when capacity may have grown without a group having ended.
    """

    def __init__(self, context: WorkerContext, *, source: Stream, work: StageWork) -> None:
        self._context = context
        self._source = source
        self._work = work
        self._tasks: set[asyncio.Task[None]] = set()
        self._busy = BusyClock()
        self.wake = asyncio.Event()

    async def run(self, *, may_claim: Callable[[], Awaitable[None]] | None = None) -> None:
        """Claim and process until drained; then wait for what is in flight.

        may_claim: awaited before each claim; returns when groups may be taken (fresh weights).
        """
        context = self._context
        async with asyncio.TaskGroup() as group:
            while not context.draining.is_set():
                await context.wait_while_paused()
                if may_claim is not None:
                    await may_claim()
                if context.draining.is_set():
                    break
                capacity = self._work.capacity()
                if capacity <= 0:
                    await self._until_capacity()
                    continue
                await self._claim_and_start(capacity, group)

    async def _claim_and_start(self, capacity: int, group: asyncio.TaskGroup) -> None:
        metrics = self._context.metrics
        started = time.monotonic()
        self._count_busy(self._busy.advance)
        block_s = _CLAIM_WAIT_S if not self._tasks else _FULL_RETRY_S
        leases = await self._context.streams.claim(self._source, capacity, block_s=block_s)
        if not self._tasks:
            metrics.idle_seconds_total.labels(cause="no_input").inc(time.monotonic() - started)
            what = None if leases else f"groups on the stream of {self._source.value}"
            self._context.waiting_for(what, WaitCause.GROUPS)
        for lease in self._context.keeper.hold(leases):
            metrics.groups_in_total.inc()
            metrics.queue_wait_seconds.observe(max(0.0, time.time() - lease.created_at))
            task = group.create_task(self._handle(lease))
            self._tasks.add(task)
            task.add_done_callback(self._done)
        await asyncio.sleep(0)  # each begins, and is counted by the work before that is asked how many more it takes
        metrics.groups_held.set(len(self._tasks))

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._context.metrics.groups_held.set(len(self._tasks))
        self.wake.set()

    async def _until_capacity(self) -> None:
        """Until a group ends, the work says so, or a moment has passed."""
        self._count_busy(self._busy.advance)
        self.wake.clear()
        await self._context.wait_for_any(self.wake, timeout_s=_FULL_RETRY_S)

    async def _handle(self, lease: Lease) -> None:
        context = self._context
        self._count_busy(self._busy.begin)
        try:
            entry = await self._work.process(lease)
            await self._hand_over(lease, entry)
        except HandBack as reason:
            context.log.info("group_handed_back", group_id=lease.group_id, reason=str(reason))
            saved = {} if reason.partial is None else {lease.group_id: reason.partial}
            await context.streams.release([lease], partials=saved)
        except (UsageError, EngineLostError):
            # Nothing is wrong with the group: this worker cannot work at all.
            await context.streams.release([lease])
            raise
        except MessageError as error:
            await self._set_aside(lease, str(error))
        except RollstreamError as error:
            await self._fail(lease, str(error))
        finally:
            context.keeper.drop([lease])
            self._count_busy(self._busy.end)

    def _count_busy(self, change: Callable[[], None]) -> None:
        before = self._busy.busy_s
        change()
        self._context.metrics.busy_seconds_total.inc(self._busy.busy_s - before)
        self._context.set_status(busy_ratio=round(self._busy.ratio, 4))

    async def _hand_over(self, lease: Lease, entry: Entry) -> None:
        target = next_stream(self._context.config.scoring, self._source, is_evaluation=entry.is_evaluation)
        while True:
            moved = await self._context.streams.hand_over(lease, entry, target)
            if moved is not Moved.FULL:
                break
            self._context.metrics.idle_seconds_total.labels(cause="output_full").inc(_FULL_RETRY_S)
            await self._context.wait_for_any(timeout_s=_FULL_RETRY_S)
        if moved is Moved.REFUSED:
            self._context.metrics.refused_total.inc()
            if entry.num_tokens:
                self._context.metrics.tokens_wasted_total.labels(reason="refused").inc(entry.num_tokens)
            self._context.log.warning("late_result_refused", group_id=lease.group_id, attempt=lease.attempt)
            return
        self._context.metrics.groups_out_total.inc()

    async def _set_aside(self, lease: Lease, reason: str) -> None:
        self._context.log.warning("dead_letter", group_id=lease.group_id, reason=reason)
        if await self._context.streams.dead_letter(lease, reason):
            self._context.metrics.dead_letters_total.labels(stage=self._source.value).inc()

    async def _fail(self, lease: Lease, reason: str) -> None:
        """Another attempt elsewhere, or a dead letter when this was the last."""
        if lease.attempt >= self._context.config.queues.max_attempts:
            await self._set_aside(lease, reason)
            return
        self._context.log.warning("group_failed", group_id=lease.group_id, attempt=lease.attempt, reason=reason)
        await self._context.streams.release([lease], has_failed=True)
