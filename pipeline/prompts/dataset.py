"""Rows of a data set, checked before the first of them is used.

In: a JSONL or parquet file, a Hub data set id, or a directory that `datasets` can read. Out: rows
of a prompt and its other columns as JSON values. What is wrong is a DataError that names file, row
(counted from 1, as an editor counts lines) and the way out; nothing is repaired in silence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from pipeline.config import DataSettings
from pipeline.errors import DataError
from pipeline.messages import Json, Prompt
from pipeline.prompts.files import RawRow, read_rows
from pipeline.prompts.values import NotJsonError, json_value

# Reward functions are called as f(prompts=..., completions=..., **columns).
_REWARD_ARGUMENTS = ("prompts", "completions", "completion_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row. number: counted from 1, the line of a JSONL file. columns: all but the prompt."""

    number: int
    prompt: Prompt
    columns: Mapping[str, Json]


class Dataset:
    """Rows by index. name: the file or Hub id, for messages. is_cut: there are more rows than were read."""

    def __init__(self, name: str, rows: Iterable[Row], *, max_rows: int | None = None) -> None:
        remaining = iter(rows)
        self.name = name
        self._rows = list(islice(remaining, max_rows))
        self.is_cut = next(remaining, None) is not None
        if not self._rows:
            raise DataError(f"{name}: no rows; give at least one prompt")

    @classmethod
    def load(cls, path: str, split: str, settings: DataSettings, *, max_rows: int | None = None) -> Dataset:
        """Read and check every row, or the first so many.

        Raises DataError for what is wrong with the data, ConfigError where a reader is missing.
        """
        rows = (_row(path, number, fields, settings) for number, fields in read_rows(path, split))
        return cls(path, rows, max_rows=max_rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]

    def kinds(self) -> dict[frozenset[str], int]:
        """Sets of columns that rows have, each with the first row that has it."""
        first: dict[frozenset[str], int] = {}
        for index, row in enumerate(self._rows):
            first.setdefault(frozenset(row.columns), index)
        return first

    def where(self, index: int) -> str:
        """Name of a row, for messages."""
        return f"{self.name}, row {self._rows[index].number}"


def _row(name: str, number: int, fields: RawRow, settings: DataSettings) -> Row:
    where = f"{name}, row {number}"
    column = settings.prompt_column
    if column not in fields:
        raise DataError(
            f"{where}: no column {column!r}; there are: {', '.join(sorted(fields)) or 'none'}. "
            "Set data.prompt_column to the one that holds the prompt"
        )
    columns = {key: _column(where, key, value) for key, value in fields.items() if key != column}
    for key in _REWARD_ARGUMENTS:
        if key in columns:
            raise DataError(f"{where}: a column cannot be called {key!r}, reward functions use that name: rename it")
    return Row(number=number, prompt=_prompt(where, column, _column(where, column, fields[column])), columns=columns)


def _column(where: str, column: str, value: object) -> Json:
    try:
        return json_value(value)
    except NotJsonError as error:
        raise DataError(f"{where}: column {column!r} {error}") from error
    except RecursionError:
        raise DataError(f"{where}: column {column!r} is nested too deeply: flatten it, or write it as text") from None


def _prompt(where: str, column: str, value: Json) -> Prompt:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value:
        return [_message(f"{where}: {column}, message {position}", item) for position, item in enumerate(value, 1)]
    if value is None or value in ("", []):
        raise DataError(f"{where}: {column!r} is empty; fill it in or remove the row")
    raise DataError(
        f'{where}: {column!r} is {_kind(value)}; give text, or a list of messages {{"role": "user", "content": "..."}}'
    )


def _message(where: str, value: Json) -> dict[str, str]:
    if not isinstance(value, dict):
        raise DataError(f'{where} is {_kind(value)}, expected {{"role": "user", "content": "..."}}')
    # Parquet gives every message the keys of all, so that absent ones arrive as None.
    message = {key: item for key, item in value.items() if item is not None}
    for key in ("role", "content"):
        if key not in message:
            raise DataError(f"{where} has no {key!r}; it needs role and content, both text")
    for key, item in message.items():
        if not isinstance(item, str):
            raise DataError(f"{where}: {key!r} is {_kind(item)}, expected text")
    return {key: str(item) for key, item in message.items()}


def _kind(value: Json) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "empty"}
    return names.get(type(value), "a number")
