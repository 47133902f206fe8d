"""Answers of Prometheus to the queries of a board.

In: the address of a Prometheus, a panel, and what its variables stand for. Out: series with a name
each, as arrays over one axis of time.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
_NUM_POINTS = 240
_VARIABLE = re.compile(r"\$(\w+)")
_LABEL = re.compile(r"\{\{\s*(\w+)\s*\}\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """name: as the legend has it. values: [N] over the window's times, NaN where there is none."""

    name: str
    labels: Mapping[str, str]
    values: Values

    @property
    def last(self) -> float:
        """The last number; NaN without any."""
        numbers = self.values[np.isfinite(self.values)]
        return float(numbers[-1]) if len(numbers) else float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened. at_s: since the window's start. name: of the board's annotation."""

    at_s: float
    name: str
    color: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What is looked at. url: of Prometheus. start, end: Unix seconds. rate_s: what rates are taken over."""

    url: str
    run: str
    start: float
    end: float
    rate_s: float

    @property
    def step_s(self) -> float:
        """Seconds between two points."""
        return max(1.0, (self.end - self.start) / _NUM_POINTS)

    @property
    def times(self) -> Values:
        """Of the points, [N], in seconds since the start."""
        count = round((self.end - self.start) / self.step_s) + 1
        return np.linspace(0.0, (count - 1) * self.step_s, count)

    def filled(self, expr: str) -> str:
        """An expression with its variables replaced."""
        values = {
            "run": self.run,
            "role": ".*",
            "worker": ".*",
            "__rate_interval": f"{self.rate_s:g}s",
            "__interval": f"{self.step_s:.0f}s",
        }
        return _VARIABLE.sub(lambda match: values[match[1]], expr)

    def series(self, panel: Mapping[str, Any]) -> list[Series]:
        """Of all queries of a panel, in their order. Raises RuntimeError with what Prometheus says."""
        found = []
        for target in panel.get("targets", ()):
            for item in self._ask(self.filled(target["expr"])):
                labels = item["metric"]
                name = _named(target.get("legendFormat", ""), labels)
                found.append(Series(name=name, labels=labels, values=self._on_axis(item["values"])))
        return found

    def marks(self, board: Mapping[str, Any]) -> list[Mark]:
        """Where each of the board's annotations begins. Raises RuntimeError with what Prometheus says."""
        found = []
        for item in board["annotations"]["list"]:
            for answer in self._ask(self.filled(item["target"]["expr"])):
                is_there = np.isfinite(self._on_axis(answer["values"]))  # [N]
                begins = np.flatnonzero(is_there & ~np.concatenate([[False], is_there[:-1]]))
                found += [Mark(at_s=float(at), name=item["name"], color=item["iconColor"]) for at in self.times[begins]]
        return found

    def _on_axis(self, points: list[tuple[float, str]]) -> Values:
        values = np.full(len(self.times), np.nan)
        for at, value in points:
            place = round((at - self.start) / self.step_s)
            if 0 <= place < len(values):
                values[place] = float(value)
        return values

    def _ask(self, expr: str) -> list[dict[str, Any]]:
        words = urllib.parse.urlencode({"query": expr, "start": self.start, "end": self.end, "step": self.step_s})
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/query_range?{words}", timeout=60) as answer:
                return list(json.load(answer)["data"]["result"])
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{expr}: {error.read().decode()}") from error
        except urllib.error.URLError as error:
            raise RuntimeError(f"no Prometheus answers at {self.url}: {error.reason}") from error


def _named(legend: str, labels: Mapping[str, str]) -> str:
    return _LABEL.sub(lambda match: labels.get(match[1], ""), legend)
