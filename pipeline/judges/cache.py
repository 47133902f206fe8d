"""Scores that were given before, by the content that was judged.

In: a key made of all that the judge was asked with. Out: its score. A file is shared by all judges that
name it, and by later runs; without one the newest scores are kept in memory.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections import OrderedDict
from pathlib import Path

import structlog

from pipeline.errors import ConfigError
from pipeline.messages import Json

_log = structlog.get_logger("pipeline.judges")
_MOST_IN_MEMORY = 100_000
_PATIENCE_S = 10.0


class ScoreCache:
    """file: where scores are kept; empty for memory. setting: that names it. Raises ConfigError."""

    def __init__(self, file: str, *, setting: str) -> None:
        self._memory: OrderedDict[str, float] = OrderedDict()
        self._setting = setting
        self._database = _open(file, setting) if file else None

    def get(self, key: str) -> float | None:
        """The score under this key; None where there is none."""
        if (score := self._memory.get(key)) is not None or self._database is None:
            return score
        try:
            row = self._database.execute("SELECT score FROM scores WHERE key = ?", (key,)).fetchone()
        except sqlite3.Error as error:
            self._give_up(error)
            return None
        return None if row is None else float(row[0])

    def put(self, key: str, score: float) -> None:
        """Keep it."""
        if self._database is not None:
            try:
                with self._database:
                    self._database.execute("INSERT OR REPLACE INTO scores VALUES (?, ?)", (key, score))
            except sqlite3.Error as error:
                self._give_up(error)
            else:
                return
        self._memory[key] = score
        if len(self._memory) > _MOST_IN_MEMORY:
            self._memory.popitem(last=False)

    def _give_up(self, error: sqlite3.Error) -> None:
        """A full disk, or a file that was taken away, ends no judge: what it knows stays in memory from now on."""
        _log.warning("scores_not_kept", setting=self._setting, problem=str(error))
        self.close()
        self._database = None

    def close(self) -> None:
        """Safe to call twice."""
        if self._database is not None:
            self._database.close()


def key_of(request: Json) -> str:
    """The same for equal requests, whoever makes them."""
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


def _open(file: str, setting: str) -> sqlite3.Connection:
    try:
        Path(file).expanduser().parent.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(Path(file).expanduser(), timeout=_PATIENCE_S)
        with database:
            database.execute("CREATE TABLE IF NOT EXISTS scores (key TEXT PRIMARY KEY, score REAL NOT NULL)")
            database.execute("SELECT key, score FROM scores LIMIT 1")
    except (OSError, ValueError, RuntimeError, sqlite3.Error) as error:  # RuntimeError: a ~user that there is not
        raise ConfigError(
            f"{setting} = {file!r} cannot be used ({error}): name a file that may be written, or leave it out"
        ) from error
    return database
