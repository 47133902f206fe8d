"""The order in which rows are fed, as a function of (seed, ordinal) alone.

In: number of rows, seed, epochs. Out: the row at any position. There is no state to save: a cursor
is enough to go on exactly where a run stopped.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


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
