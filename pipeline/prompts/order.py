"""The order in which rows are fed, as a function of (seed, ordinal), and of success rates where these are asked for.

In: number of rows, seed, epochs. Out: the row at any position. There is no state to save: a cursor, and the
statistics where they count, are enough to go on exactly where a run stopped.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from pipeline.prompts.statistics import PromptStatistics


class Order(Protocol):
    """Which row is fed when."""

    def at(self, ordinal: int) -> tuple[int, int] | None:
        """(epoch, row index) at position `ordinal`, counted from 0; None behind the last epoch."""


class PromptOrder:
    """Every row once an epoch; with `shuffle` a new order in each.

    num_rows: rows of the data set, at least 1. epochs: passes over the data, 0 has no end.
    """

    def __init__(self, num_rows: int, *, seed: int, shuffle: bool = True, epochs: int = 0) -> None:
        if num_rows < 1:
            raise ValueError("an order needs at least one row")
        self._num_rows = num_rows
        self._seed = seed
        self._shuffle = shuffle
        self._epochs = epochs
        self._cached_epoch = -1
        self._cached: npt.NDArray[np.intp] = np.empty(0, dtype=np.intp)

    def at(self, ordinal: int) -> tuple[int, int] | None:
        """(epoch, row index) at position `ordinal`, counted from 0; None behind the last epoch."""
        epoch, position = divmod(ordinal, self._num_rows)
        if self._epochs and epoch >= self._epochs:
            return None
        if not self._shuffle:
            return epoch, position
        return epoch, int(self._permutation(epoch)[position])

    def _permutation(self, epoch: int) -> npt.NDArray[np.intp]:
        # Sorting raw Philox words keeps the order the same under every version of numpy: it
        # guarantees the words of a bit generator, but not what Generator.permutation makes of them.
        if epoch != self._cached_epoch:
            words = np.random.Philox(np.random.SeedSequence([self._seed, epoch])).random_raw(self._num_rows)
            self._cached = np.argsort(words, kind="stable")
            self._cached_epoch = epoch
        return self._cached


class CurriculumOrder:
    """The first epoch as in `PromptOrder`; then rows are drawn, the uncertain ones more often.

    A row of success rate p has the weight p (1 - p) + floor, which is the variance of its rewards where these are
    0 or 1; one that never came back with a reward has the floor alone. Draws are with replacement, so that an
    epoch is as many groups as there are rows. They depend on (seed, ordinal) and on the statistics at the time.
    """

    def __init__(
        self, first: PromptOrder, statistics: PromptStatistics, *, seed: int, epochs: int, floor: float
    ) -> None:
        self._first = first
        self._statistics = statistics
        self._seed = seed
        self._epochs = epochs
        self._floor = floor
        self._revision = -1
        self._bounds: npt.NDArray[np.float64] = np.empty(0)

    def at(self, ordinal: int) -> tuple[int, int] | None:
        """(epoch, row index) at position `ordinal`, by what is known of the rows now; None behind the last epoch."""
        epoch, position = divmod(ordinal, len(self._statistics))
        if epoch == 0:
            return self._first.at(ordinal)
        if self._epochs and epoch >= self._epochs:
            return None
        (word,) = np.random.Philox(np.random.SeedSequence([self._seed, epoch, position])).random_raw(1)
        bounds = self._cumulative()
        drawn = float(word >> np.uint64(11)) * 2.0**-53 * bounds[-1]  # [0, sum of the weights)
        return epoch, min(int(np.searchsorted(bounds, drawn, side="right")), len(bounds) - 1)

    def _cumulative(self) -> npt.NDArray[np.float64]:
        if self._revision != self._statistics.revision:
            rates = np.nan_to_num(self._statistics.success_rates(), nan=0.0)
            self._bounds = np.cumsum(rates * (1.0 - rates) + self._floor)
            self._revision = self._statistics.revision
        return self._bounds
