"""What shipped rewards read: the text of a completion, and a column of the data set.

In: TRL's arguments. Out: plain texts and values, or an error that names the missing column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Completions: TypeAlias = Sequence[str | list[dict[str, str]]]


def texts_of(completions: Completions) -> list[str]:
    """The text of each completion; of a chat, what its messages say."""
    return [
        completion if isinstance(completion, str) else "".join(message["content"] for message in completion)
        for completion in completions
    ]


def column(columns: Mapping[str, Sequence[Any]], name: str, num_completions: int) -> Sequence[Any]:
    """One value for each completion. Raises ValueError where the data set has no such column."""
    if num_completions == 0:
        return []
    if name not in columns:
        there = ", ".join(sorted(columns.keys() - {"completion_ids"})) or "none besides the prompt"
        raise ValueError(f"needs the data column {name!r}; the data set has: {there}")
    return columns[name]
