"""Whether a receiver is better off with what changed, or with everything.

In: how long transfers of each sort took. Out: which sort to ask for next. On a slow line what
changed is much less to send; on a fast one with slow cores it may take longer to make and to apply.
"""

from __future__ import annotations

from typing import Literal

_SHARE = 0.3  # of the latest measurement in the running mean
_NUM_FIRST = 2  # of each sort before they are compared; the very first, with fresh memory, says little
_TRIES_COST = 0.05  # of all time may go into finding out whether the other sort has become better


class Choice:
    """The running mean of seconds for a byte of the model, for each sort."""

    def __init__(self, encoding: Literal["auto", "delta", "snapshot"]) -> None:
        self._encoding = encoding
        self._costs: dict[bool, float] = {}
        self._nums = {True: 0, False: 0}
        self._since_other = 0

    @property
    def wants_patches(self) -> bool:
        """Which sort to ask for: patches or a snapshot."""
        if self._encoding != "auto":
            return self._encoding == "delta"
        if min(self._nums.values()) < _NUM_FIRST:
            return self._nums[True] < _NUM_FIRST
        better = self._costs[True] <= self._costs[False]
        extra = self._costs[not better] / self._costs[better] - 1
        return better if self._since_other * _TRIES_COST < max(extra, 1.0) else not better

    def note(self, *, is_patches: bool, seconds: float, num_bytes: int) -> None:
        """A transfer has ended. seconds: making of the patches included. num_bytes: of the model."""
        cost = max(seconds, 1e-9) / max(num_bytes, 1)
        is_usual = self._costs.get(is_patches, cost) <= self._costs.get(not is_patches, cost)
        self._since_other = self._since_other + 1 if is_usual else 0
        self._nums[is_patches] += 1
        before = self._costs[is_patches] if self._nums[is_patches] > _NUM_FIRST else cost
        self._costs[is_patches] = cost + (1 - _SHARE) * (before - cost)
