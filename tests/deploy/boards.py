"""The boards as Grafana gets them: panels and their queries, read from the committed JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.deploy.promql import DEPLOY

DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))


@dataclass(frozen=True, slots=True)
class PanelQuery:
    """One query of one panel. board, panel, number: where it stands."""

    board: str
    panel: str
    number: int
    expr: str

    @property
    def where(self) -> str:
        """Its name in tests."""
        return f"{self.board}/{self.panel}/{self.number}"


def read(path: Path) -> dict[str, Any]:
    """One board."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def queries() -> list[PanelQuery]:
    """Every query of every panel."""
    return [
        PanelQuery(path.stem, panel["title"], number, target["expr"])
        for path in DASHBOARDS
        for panel in read(path)["panels"]
        for number, target in enumerate(panel.get("targets", ()))
    ]


def filled(expr: str, values: Mapping[str, str]) -> str:
    """An expression with its variables replaced, as Grafana does."""
    for name in sorted(values, key=len, reverse=True):
        expr = expr.replace(f"${name}", values[name])
    assert "$" not in expr, expr
    return expr
