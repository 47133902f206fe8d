"""Where Prometheus finds the workers of a run: its HTTP service discovery.

In: the run as it is. Out: addresses of the workers that are alive. Prometheus goes on with the last
answer when there is no other, so whoever gives these answers tells it, before it leaves, whom it
need not look for any more. A run that has ended then raises no alarm; one that was killed does.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from pipeline.messages import Json
from pipeline.roster import WorkerInfo
from pipeline.run.status import RunStatus

_META = "__meta_rollstream_"
_USUAL_INTERVAL_S = 5.0
_LEAST_PATIENCE_S, _MOST_PATIENCE_S = 5.0, 10.0
_NUM_INTERVALS = 5  # one that was short says only that the one before it came late


class Targets:
    """Answers from another thread than the one that shows it the run. itself: worker id of who answers."""

    def __init__(self, run: str, itself: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._itself = itself
        self._clock = clock
        self._status: RunStatus | None = None
        self._asked_at: float | None = None
        self._intervals_s: deque[float] = deque(maxlen=_NUM_INTERVALS)
        self._leaves_at: float | None = None
        self.said_goodbye = threading.Event()

    def show(self, status: RunStatus | None) -> None:
        """From now on answer this. None: Redis did not answer."""
        self._status = status

    def answer(self) -> Json:
        """One entry for each worker; None while Redis is away: Prometheus goes on with those that it knows."""
        now = self._clock()
        if self._asked_at is not None:
            self._intervals_s.append(now - self._asked_at)
        self._asked_at = now
        status = self._status
        if status is None:
            return None
        if self._leaves_at is not None and now >= self._leaves_at:
            self.said_goodbye.set()
        return [self._target(worker) for worker in status.workers if self._is_there(worker, status)]

    def leave(self, others_after_s: float) -> float:
        """Whoever answers is about to go. Returns for how many seconds it should wait to be asked once more.

        others_after_s: until all who were asked to leave at the same time have said so. What is
        answered sooner is no goodbye, as they would be looked for ever after.
        """
        now = self._clock()
        self._leaves_at = now + others_after_s
        if self._asked_at is None or now - self._asked_at > _MOST_PATIENCE_S:
            return 0.0
        interval_s = max(self._intervals_s, default=_USUAL_INTERVAL_S)
        return min(others_after_s + max(2 * interval_s + 1.0, _LEAST_PATIENCE_S), _MOST_PATIENCE_S)

    def _is_there(self, worker: WorkerInfo, status: RunStatus) -> bool:
        if not worker.is_alive or not worker.address:
            return False
        is_going = worker.worker_id == self._itself or worker.status.get("state") == "draining"
        return not (self._leaves_at is not None and (is_going or status.stop_reason is not None))

    def _target(self, worker: WorkerInfo) -> Json:
        labels = {"run": self._run, "role": worker.role, "worker": worker.worker_id, "host": worker.host}
        return {"targets": [worker.address], "labels": {f"{_META}{name}": value for name, value in labels.items()}}
