"""Answers on a terminal: tables for people, JSON for programs.

In: carriers, rows. Out: text on stdout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

import click

from pipeline.tables import table


def echo_json(value: object) -> None:
    """One line of JSON. Dataclasses become objects; what JSON does not know becomes a string."""
    click.echo(json.dumps(_plain(value), default=str))


def echo_table(headers: Sequence[str], rows: Sequence[Sequence[object]], nothing: str = "") -> None:
    """Aligned columns; the text `nothing` where there is no row."""
    click.echo("\n".join(table(headers, rows)) if rows else nothing)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
