"""Rates of one worker over the last minute, from its own counters.

In: its metrics. Out: a few numbers for the registry: groups and tokens so far and per second, the
share of time without work and its cause, and how long ago anything moved. All workers are measured
over one window, that rates may be compared.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pipeline.instruments import PREFIX
from pipeline.messages import Json
from pipeline.metrics import Metrics

WINDOW_S = 60.0
_GROUPS_IN, _GROUPS_OUT = f"{PREFIX}groups_in_total", f"{PREFIX}groups_out_total"
_TOKENS, _IDLE = f"{PREFIX}tokens_out_total", f"{PREFIX}idle_seconds_total"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Totals:
    """Counters at one moment. idle_s: seconds by cause."""

    at: float
    groups_in: float = 0.0
    groups_out: float = 0.0
    tokens: float = 0.0
    idle_s: dict[str, float] = field(default_factory=dict)

    @property
    def progress(self) -> tuple[float, float, float]:
        return (self.groups_in, self.groups_out, self.tokens)

    def has_moved_since(self, before: _Totals, *, with_idle: bool) -> bool:
        """Whether anything was counted in between. with_idle: time without work counts, too."""
        return self.progress != before.progress or (with_idle and self.idle_s != before.idle_s)


class Rates:
    """Differences of counters over a sliding window. clock: monotonic seconds.

    The window begins and ends where something was counted. A step of the trainer is counted as a
    whole when it ends; between fixed moments its rate would jump with every step that comes or goes.
    So its waits, which are counted while they last, move no end of the window.
    """

    def __init__(self, metrics: Metrics, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._changes: deque[_Totals] = deque([self._read()])
        self._progress: tuple[object, Json] = (self._changes[0].progress, None)
        self._progress_at = self._changes[0].at

    def measure(self, in_work: Json = None) -> dict[str, Json]:
        """Fields for the registry, as of now. in_work: a count that rises while a group is in work."""
        now = self._read()
        if self._progress != (now.progress, in_work):
            self._progress, self._progress_at = (now.progress, in_work), now.at
        if now.has_moved_since(self._changes[-1], with_idle=self._metrics.constants["role"] != "trainer"):
            self._changes.append(now)
        end = self._end(now)
        while len(self._changes) > 2 and end.at - self._changes[1].at >= WINDOW_S:
            self._changes.popleft()
        then = self._changes[0]
        seconds = max(end.at - then.at, 1e-9)
        idle = {cause: (total - then.idle_s.get(cause, 0.0)) / seconds for cause, total in end.idle_s.items()}
        return {
            "groups_in": int(now.groups_in),
            "groups_out": int(now.groups_out),
            "tokens_out": int(now.tokens),
            "groups_per_s": round((now.groups_out - then.groups_out) / seconds, 3),
            "tokens_per_s": round((now.tokens - then.tokens) / seconds, 1),
            "idle_s": round(sum(now.idle_s.values()), 3),
            "idle_ratio": round(min(1.0, sum(idle.values(), 0.0)), 3),
            "idle_cause": max(idle, key=lambda cause: idle[cause]) if sum(idle.values()) > 0 else None,
            "progress_age_s": round(now.at - self._progress_at, 1),
        }

    def _end(self, now: _Totals) -> _Totals:
        """The last change, or now when the next one is long overdue."""
        last = self._changes[-1]
        usual_s = last.at - self._changes[-2].at if len(self._changes) > 1 else 0.0
        return last if now.at - last.at < max(WINDOW_S, 2 * usual_s) else now

    def _read(self) -> _Totals:
        sums: dict[str, float] = {}
        idle: dict[str, float] = {}
        for family in self._metrics.registry.collect():
            for sample in family.samples:
                if sample.name == _IDLE:
                    idle[sample.labels["cause"]] = sample.value
                elif sample.name in {_GROUPS_IN, _GROUPS_OUT, _TOKENS}:
                    sums[sample.name] = sample.value
        return _Totals(
            at=self._clock(),
            groups_in=sums.get(_GROUPS_IN, 0.0),
            groups_out=sums.get(_GROUPS_OUT, 0.0),
            tokens=sums.get(_TOKENS, 0.0),
            idle_s=idle,
        )
