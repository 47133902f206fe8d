"""Whether steps still teach anything: where all rewards of a group are equal, its advantages are 0.

In: a row of metrics after each step. Out: now and then the news that nothing was learnt for long.
"""

from __future__ import annotations

from collections.abc import Mapping

_FIRST = 20  # steps in a row; then at each doubling


class SignalWatch:
    """Counts steps in a row without a group whose rewards differ."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._next = _FIRST

    def step(self, row: Mapping[str, float]) -> int:
        """How many there were where it is time to say so, else 0. row: of a step."""
        if row.get("zero_variance_groups", 0.0) + row.get("unscored_groups", 0.0) < row["groups"]:
            self._num_steps, self._next = 0, _FIRST
            return 0
        self._num_steps += 1
        if self._num_steps < self._next:
            return 0
        self._next *= 2
        return self._num_steps
