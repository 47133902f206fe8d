"""What goes wrong in reward functions, said often enough to be seen and seldom enough to be read.

In: every call and every failure. Out: a log line for the first failure of each function and kind, with
its traceback, then one every ten seconds with the numbers since. It never logs each failure of a
function that always fails.
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
        self._num_calls: Counter[str] = Counter()
        self._num_calls_said: Counter[tuple[str, Outcome]] = Counter()

    def count_call(self, function: str) -> None:
        """One call of a function, before its failure is added if it failed."""
        self._num_calls[function] += 1

    def add(self, function: str, outcome: Outcome, problem: str, traceback: str = "") -> None:
        """One call that failed, as a whole or for some completions.

        problem: exception type, message and the line that failed, where there are any.
        """
        kind = (function, outcome)
        self._num_since[kind] += 1
        now, said_at = self._clock(), self._said_at.get(kind)
        if said_at is not None and now - said_at < REPEAT_S:
            return
        fields = {"traceback": traceback} if traceback and said_at is None else {}
        self._said_at[kind] = now
        num_failures = self._num_since.pop(kind)  # since the line before, this one included
        num_calls = self._num_calls[function] - self._num_calls_said[kind]
        self._num_calls_said[kind] = self._num_calls[function]
        _log.warning(
            "reward_failed",
            function=function,
            outcome=outcome.value,
            problem=problem,
            num_failures=num_failures,
            num_calls=num_calls,
            **fields,
        )
