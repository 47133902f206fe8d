"""How often each row of the data set was seen, and what was earned with it.

In: rewards of scored groups. Out: success rates that an order can draw by, and how much of the data is solved.
Takes 20 bytes a row, whatever happens, and goes into a checkpoint as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

import msgpack
import numpy as np
import numpy.typing as npt

from pipeline.errors import DataError

# So many of the last groups decide a row's mean: older policies' answers say little.
MEMORY = 4
_TOLERANCE = 1e-6
_TYPES: Mapping[str, str] = {"seen": "<u4", "mean": "<f4", "last": "<f4", "version": "<i8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How many rows there are, were seen, and were solved by all, some or none of the completions when last seen."""

    in_data: int
    seen: int
    always_solved: int
    sometimes_solved: int
    never_solved: int

    def describe(self) -> dict[str, int]:
        """As fields of a record."""
        return {f"prompts_{item.name}": int(getattr(self, item.name)) for item in fields(self)}

    @classmethod
    def of(cls, said: Mapping[str, object]) -> Coverage | None:
        """What `describe` gave, found among other fields; None where one is missing."""
        values = {item.name: said.get(f"prompts_{item.name}") for item in fields(cls)}
        if not all(isinstance(value, int | float) for value in values.values()):
            return None
        return cls(**{name: int(cast(float, value)) for name, value in values.items()})

    def __str__(self) -> str:
        share = self.seen / self.in_data if self.in_data else 0.0
        parts = [
            f"{number / max(1, self.seen):.0%} {how}"
            for number, how in (
                (self.always_solved, "always"),
                (self.sometimes_solved, "sometimes"),
                (self.never_solved, "never"),
            )
        ]
        return f"{self.seen:,} of {self.in_data:,} seen ({share:.0%}), solved: {', '.join(parts)}"


class PromptStatistics:
    """Counts and means of the rows of one data set.

    solved_reward: mean reward of a group that counts as solved; success rates are shares of it.
    revision: rises with every observation.
    """

    def __init__(self, num_rows: int, *, solved_reward: float = 1.0) -> None:
        self.revision = 0
        self._solved_reward = solved_reward
        self._columns: dict[str, npt.NDArray[Any]] = {
            name: np.zeros(num_rows, dtype=dtype) for name, dtype in _TYPES.items()
        }

    def __len__(self) -> int:
        return len(self._columns["seen"])

    def observe(self, row: int, reward: float, version: int) -> None:
        """A group of this row came back. reward: mean of its completions. version: newest weights that wrote it.

        A row that the data set does not have, as of a prompt that somebody else fed, is passed over.
        """
        if not 0 <= row < len(self):
            return
        seen, mean = self._columns["seen"], self._columns["mean"]
        seen[row] += 1
        mean[row] += (reward - mean[row]) / min(seen[row], MEMORY)
        self._columns["last"][row] = reward
        self._columns["version"][row] = version
        self.revision += 1

    def of_row(self, row: int) -> tuple[int, float, int]:
        """Times seen, mean reward of the last few groups, weights of the last one."""
        return (
            int(self._columns["seen"][row]),
            float(self._columns["mean"][row]),
            int(self._columns["version"][row]),
        )

    def success_rates(self) -> npt.NDArray[np.float64]:
        """Of each row, 0 to 1; NaN where it was not seen, [rows]."""
        rates = np.clip(self._columns["mean"].astype(np.float64) / self._solved_reward, 0.0, 1.0)
        return np.where(self._columns["seen"] > 0, rates, np.nan)

    def coverage(self) -> Coverage:
        """Of all rows, as they were when last seen."""
        is_seen = self._columns["seen"] > 0
        last = self._columns["last"][is_seen] / self._solved_reward
        num_seen, num_always, num_never = (
            len(last),
            int((last >= 1 - _TOLERANCE).sum()),
            int((last <= _TOLERANCE).sum()),
        )
        return Coverage(
            in_data=len(self),
            seen=num_seen,
            always_solved=num_always,
            sometimes_solved=num_seen - num_always - num_never,
            never_solved=num_never,
        )

    def encode(self) -> bytes:
        """All that was observed; rows that were not seen take no room."""
        rows = np.flatnonzero(self._columns["seen"]).astype("<u4")
        columns = {name: self._columns[name][rows].tobytes() for name in _TYPES}
        return bytes(msgpack.packb({"rows": rows.tobytes(), **columns}))

    def restore(self, data: bytes) -> None:
        """Go on from what `encode` gave; rows beyond this data set are left out. Raises DataError."""
        try:
            packed = msgpack.unpackb(data)
            rows = np.frombuffer(packed["rows"], dtype="<u4")
            columns = {name: np.frombuffer(packed[name], dtype=dtype) for name, dtype in _TYPES.items()}
            is_known = rows < len(self)
            for name, values in columns.items():
                self._columns[name][rows[is_known]] = values[is_known]
        except (ValueError, KeyError, TypeError, IndexError, msgpack.UnpackException) as error:
            raise DataError(f"statistics of prompts cannot be read: {error}") from error
        self.revision += 1
