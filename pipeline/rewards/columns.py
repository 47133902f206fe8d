"""What shipped rewards read: the text of a completion, and a column of the data set.

In: TRL's arguments. Out: plain texts and values, or an error that names the missing column.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

Completions: TypeAlias = Sequence[str | list[dict[str, str]]]


def texts_of(completions: Completions) -> list[str]:
    """The text of each completion; of a chat, what its messages say."""
    return [
        completion if isinstance(completion, str) else "".join(message["content"] for message in completion)
        for completion in completions
    ]


class MissingColumnError(ValueError):
    """The data set has no column that a reward needs."""

    def __init__(self, name: str, columns: Iterable[str]) -> None:
        there = ", ".join(sorted(columns)) or "none besides the prompt"
        super().__init__(f"needs the data column {name!r}; the data set has: {there}")


def column(columns: Mapping[str, Sequence[Any]], name: str, num_completions: int) -> Sequence[Any]:
    """One value for each completion. Raises MissingColumnError."""
    if num_completions == 0:
        return []
    if name not in columns:
        raise MissingColumnError(name, columns)
    return columns[name]
