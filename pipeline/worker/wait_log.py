"""When a worker says that it waits: soon, then ever more seldom.

In: what it waits for now, and since when. Out: whether to say so. An idle worker is healthy, and its
log must not hide what is not.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from itertools import chain, count

_FIRST_S, _AGAIN_S, _RECENT_S = 2.0, 10.0, 60.0
_CHANGING = re.compile(r"[\d(]")  # numbers, and what stands in brackets, may change from moment to moment


class WaitLog:
    """Asked twice a second or so. clock: monotonic seconds."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kind = ""
        self._waited_s = float("inf")
        self._due_s = _FIRST_S
        self._said_at: dict[str, float] = {}

    def is_due(self, what: str | None, waited_s: float) -> bool:
        """Whether to say now what has been waited for since `waited_s`; None where nothing is.

        A wait for something new is said after two seconds; then the whole wait after 10, 30, 60, 120 s
        and so on. One of many short waits for the same is said only when it lasts.
        """
        if what is None:
            self._waited_s = float("inf")
            return False
        kind = _CHANGING.split(what, maxsplit=1)[0]
        is_recent = self._clock() - self._said_at.get(kind, float("-inf")) < _RECENT_S
        if waited_s < self._waited_s:
            self._due_s = _AGAIN_S if is_recent else _FIRST_S
        elif kind != self._kind and not is_recent:
            self._due_s = _FIRST_S
        self._kind, self._waited_s = kind, waited_s
        if waited_s < self._due_s:
            return False
        self._said_at[kind] = self._clock()
        self._due_s = next(mark for mark in _marks() if mark > waited_s)
        return True


def _marks() -> chain[float]:
    """Seconds of a wait at which it is said."""
    return chain((_FIRST_S, _AGAIN_S, 30.0, 60.0, 120.0, 300.0), count(600.0, 600.0))
