"""Records as they lie on disk: one JSON object a line, and whatever else has got in between.

In: a file that is being written, was cut off by a crash, or edited by hand. Out: records that any program can
hold and write again. A line that is none ends nobody.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

_BLOCK_BYTES = 1 << 16
_MAX_DIGITS = 300  # of a whole number that a float can hold, too


def parsed(line: bytes) -> dict[str, Any] | None:
    """The record in a line; None where it holds none, as half a line does.

    NaN, infinity and numbers beyond a float, which no record is written with, become null.
    """
    try:
        record = json.loads(line, parse_constant=lambda _: None, parse_float=_finite, parse_int=_whole)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def records_in(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Whole records only: the last line of a file that is being written may be half a one."""
    return (record for line in lines if (record := parsed(line)) is not None)


def steps_in(lines: Iterable[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Records of a step, with that step."""
    return ((step, record) for record in records_in(lines) if (step := step_of(record)) is not None)


def step_of(record: Mapping[str, Any]) -> int | None:
    """The step that a record is of; None where it names none."""
    step = record.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) and step >= 0 else None


def number_in(record: Mapping[str, Any], name: str, default: float) -> float:
    """A number by name; the default where there is none."""
    value = record.get(name)
    return value if isinstance(value, int | float) else default


def lines_of(path: Path) -> Iterator[bytes]:
    """From the first to the last; none where there is no file. Raises OSError."""
    if path.is_file():
        with path.open("rb") as file:
            yield from file


def lines_backwards(path: Path) -> Iterator[bytes]:
    """From the last to the first, without reading a long file as a whole. Raises OSError."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        position = file.seek(0, os.SEEK_END)
        rest = b""
        while position > 0:
            size = min(_BLOCK_BYTES, position)
            position -= size
            file.seek(position)
            first, *complete = (file.read(size) + rest).split(b"\n")
            yield from reversed(complete)
            rest = first
        yield rest


def _finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


def _whole(text: str) -> int | None:
    return int(text) if len(text) <= _MAX_DIGITS else None
