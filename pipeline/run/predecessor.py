"""The settings with which the last trainer of a run worked.

In: settings, and `trainer.toml` in the run's directory. Out: which of them are others now. What all workers
of a run must agree on is refused elsewhere where it differs; this is about the rest.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.agreement import differences
from pipeline.config import Config
from pipeline.disk import write_whole
from pipeline.settings.files import fingerprint, show
from pipeline.settings.reference import settings

_FILE = "trainer.toml"
# Every process may have its own.
_OWN = ("run.", "redis.", "worker.")


def kept_settings(run_dir: Path) -> dict[str, str]:
    """Dotted setting -> value as JSON, of the last trainer; empty where there was none."""
    try:
        return _flat((run_dir / _FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}


def keep_settings(config: Config) -> None:
    """Leave them for whoever comes next, without secrets. Raises OSError."""
    write_whole(config.run_dir / _FILE, show(config))


def changed_settings(config: Config) -> str:
    """Every setting in which this trainer differs from the last one, with both values; empty where none does."""
    before, agreed = kept_settings(config.run_dir), fingerprint(config)
    now = {
        name: value
        for name, value in _flat(show(config)).items()
        if name in before and name not in agreed and not name.startswith(_OWN)
    }
    return differences(now, before, "before")


def _flat(text: str) -> dict[str, str]:
    tables = tomllib.loads(text)
    found = {name: _at(tables, name) for name in settings()}
    return {name: json.dumps(value, sort_keys=True, default=str) for name, value in found.items() if value is not None}


def _at(tables: Mapping[str, Any], name: str) -> Any:
    here: Any = tables
    for part in name.split("."):
        here = here.get(part) if isinstance(here, dict) else None
    return here
