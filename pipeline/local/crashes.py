"""Tells a crash that will come again from one that may not.

In: the lines of a worker's lives, and whether the run got ahead between them. Out: the error that
ended a life, and how often in a row it has. It never looks at anything but lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_LAST_WORD = "error: "
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Warning)(:.*)?")
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")


class Crashes:
    """Crashes of one worker.

    progress: gives a value that changes when the run gets ahead in a way that a restart keeps.
    """

    def __init__(self, progress: Callable[[], object]) -> None:
        self._progress = progress
        self._last_line = ""
        self._said = ""
        self._before: tuple[str, object] | None = None
        self._num_alike = 0

    def begin(self) -> None:
        """A new life."""
        self._last_line = self._said = ""

    def see(self, line: str) -> None:
        """One line of its output."""
        if line.strip():
            self._last_line = line
        if line.startswith(_LAST_WORD):
            self._said = line.removeprefix(_LAST_WORD)

    @property
    def error(self) -> str:
        """Why this life ended, in the worker's own words: what stands behind `error: `, or an exception's last line."""
        if self._said or not _EXCEPTION.fullmatch(self._last_line):
            return self._said
        return self._last_line

    def count(self) -> int:
        """A life has failed. Returns how often in a row it did so with this error and without progress between.

        Numbers in the error make no difference. 0 where the worker did not say why it ended.
        """
        now = (_NUMBERS.sub("#", self.error), self._progress())
        self._num_alike = self._num_alike + 1 if now == self._before else 1
        self._before = now
        return self._num_alike if self.error else 0
