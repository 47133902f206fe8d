"""Answers on a terminal: tables for people, JSON for programs.

In: carriers, rows. Out: text on stdout, or on stderr what goes beside it. Who reads them may be gone, and where
they are kept may be full.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, TextIO

import click

from pipeline.tables import table


def echo_json(value: object) -> None:
    """One line of JSON. Dataclasses become objects; what JSON does not know becomes a string."""
    click.echo(json.dumps(_plain(value), default=str))


def echo_table(headers: Sequence[str], rows: Sequence[Sequence[object]], nothing: str = "") -> None:
    """Aligned columns; the text `nothing` where there is no row."""
    click.echo("\n".join(table(headers, rows)) if rows else nothing)


def say_aside(text: str) -> None:
    """A line on stderr; lost where none can be written there."""
    with contextlib.suppress(OSError):
        click.echo(text, err=True)


def give_up(stream: TextIO) -> None:
    """Whatever comes goes nowhere."""
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def open_missing() -> None:
    """A process may have been started without standard output; what it says then goes nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))


def flush() -> None:
    """Write what still waits. The interpreter would end with a code of its own where that cannot be."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            give_up(stream)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
