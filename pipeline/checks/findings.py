"""What was found when a machine was looked at.

In: nothing. Out: carriers, and their text. A text never holds a password.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    HINT = "hint"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at. way_out: what to do, empty where all is well."""

    subject: str
    level: Level
    text: str
    way_out: str = ""

    @property
    def is_ok(self) -> bool:
        return self.level is not Level.ERROR


def render(findings: Iterable[Finding]) -> str:
    """Findings as text, one or two lines each."""
    lines: list[str] = []
    for finding in findings:
        lines.append(f"{finding.level:<5}  {finding.subject:<12}  {finding.text}")
        if finding.way_out:
            lines.append(f"{'':<21}-> {finding.way_out}")
    return "\n".join(lines)
