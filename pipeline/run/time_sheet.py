"""Where a trainer's time goes, counted while it passes.

In: what the trainer turns to. Out: its seconds busy and idle, as counters. A step may take minutes:
counted at its end, all of it would fall into one moment of a graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum, auto

from pipeline.metrics import Metrics


class Doing(Enum):
    """What is counted."""

    STEP = auto()
    WAIT_FOR_GROUPS = auto()


class TimeSheet:
    """Of one trainer. clock: monotonic seconds."""

    def __init__(self, metrics: Metrics, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._counters = {
            Doing.STEP: metrics.busy_seconds_total,
            Doing.WAIT_FOR_GROUPS: metrics.idle_seconds_total.labels(cause="no_input"),
        }
        self._clock = clock
        self._mark = clock()
        self._doing: Doing | None = None

    def turn_to(self, doing: Doing | None) -> None:
        """From now on it does this; None for what is not counted."""
        self.tick()
        self._doing = doing

    def tick(self) -> None:
        """Count the time since the last call."""
        now = self._clock()
        if self._doing is not None:
            self._counters[self._doing].inc(now - self._mark)
        self._mark = now
