"""Files of deploy/ and what they say to rollstream: variables, settings, commands.

In: text of any kind. Out: names and words, to be held against the real settings and the real command line.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from pipeline.settings.files import load_config
from tests.test_docs import parse_rollstream

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
# Worker's leave after worker.drain_timeout_s: cancel, hand back, exit.
LEAVE_S = 20.0
_VARIABLE = re.compile(r"\bROLLSTREAM_[A-Z0-9]+(?:__[A-Z0-9_]+)+")
_COMMAND = re.compile(
    r"(?:^|[\s=/\"'(])rollstream ((?:generator|scorer|teacher|judge|trainer|exporter|status|drain|keys|config)\b"
    r"[^\n|&;>#`)]*)"
)


def texts(*suffixes: str) -> Iterator[tuple[Path, str]]:
    """Text files below deploy/ with one of these suffixes; all without one."""
    for path in sorted(DEPLOY.rglob("*")):
        is_ours = path.is_file() and "__pycache__" not in path.parts and "secrets" not in path.parts
        if is_ours and path.suffix != ".json" and (not suffixes or path.suffix in suffixes):
            yield path, path.read_text(encoding="utf-8")


def variables(text: str) -> set[str]:
    """Variables that mean a setting."""
    return set(_VARIABLE.findall(text))


def commands(text: str) -> list[list[str]]:
    """Words behind `rollstream` where a worker, or another command, is started."""
    joined = text.replace("\\\n", " ")
    return [shlex.split(match[1].rstrip('"\\ ')) for match in _COMMAND.finditer(joined)]


def check_variables(environ: Mapping[str, str]) -> None:
    """Raises where the environment has a setting that is none, or a value that is not allowed."""
    load_config([], environ=environ)


def check_command(words: list[str]) -> None:
    """Raises where the real command line does not take these words."""
    parse_rollstream(words)
