"""What goes wrong in reward functions, said often enough to be seen and seldom enough to be read.

In: every failure. Out: a log line for the first of each function and kind, with its traceback, then
one every ten seconds with the number since. It never logs each failure of a function that always fails.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Final

import structlog

from pipeline.messages import Outcome

REPEAT_S: Final = 10.0
_log = structlog.get_logger()


class FailureLog:
    """Log lines about failures. clock: monotonic seconds."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said_at: dict[tuple[str, Outcome], float] = {}
        self._num_since: Counter[tuple[str, Outcome]] = Counter()

    def add(self, function: str, outcome: Outcome, problem: str, traceback: str = "") -> None:
        """One failure. problem: exception type, message and the line that failed, where there are any."""
        kind = (function, outcome)
        self._num_since[kind] += 1
        now, said_at = self._clock(), self._said_at.get(kind)
        if said_at is not None and now - said_at < REPEAT_S:
            return
        fields = {"traceback": traceback} if traceback and said_at is None else {}
        self._said_at[kind] = now
        num_failures = self._num_since.pop(kind)  # since the line before, this one included
        _log.warning(
            "reward_failed",
            function=function,
            outcome=outcome.value,
            problem=problem,
            num_failures=num_failures,
            **fields,
        )
