"""A board: eight tiles, then rows of panels in the order in which groups flow.

In: tiles and rows. Out: Grafana's JSON, the same at every call. Every board has the same variables,
links to all others, and marks where the fleet changed, checkpoints were written and alerts fired.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard

from deploy.grafana.panels import SOURCE, Panel

PREFIX = "rollstream-"
_TAG = "rollstream"
_MOST_NUMBER = 1_000_000
_THERE = 'sum by (role) (max by (role, state) (rollstream_workers{run="$run", state!="lost"}'
_NOW, _BEFORE = f"{_THERE}))", f"{_THERE} offset $__interval))"
_CHECKPOINT = 'max by (run) (rollstream_checkpoint_step{run="$run"}'
# Name, expression, colour, title, text. An expression has a value, other than 0, where there is something to mark.
_MARKS = (
    (
        "Fleet",
        f"({_NOW} or 0 * {_BEFORE}) - ({_BEFORE} or 0 * {_NOW}) != 0",
        "blue",
        "{{role}}s come or go",
        "more or fewer {{role}}s than before",
    ),
    (
        "Checkpoints",
        f"{_CHECKPOINT}) unless {_CHECKPOINT}) == {_CHECKPOINT} offset $__interval)",
        "green",
        "checkpoint",
        "what was trained until here is kept",
    ),
    (
        "Alerts",
        'ALERTS{alertname=~"Rollstream.*", alertstate="firing", run="$run"}',
        "red",
        "{{alertname}}",
        "{{severity}}",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One station of the way, and what shows there."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """name: the end of its address. tiles: eight. rows: in the order of flow."""

    name: str
    title: str
    about: str
    tiles: Sequence[Panel]
    rows: Sequence[Row]

    def to_json(self) -> str:
        """What Grafana reads. A panel's number is made of its name, so that links to it stay right when others come."""
        built = self._builder().build()
        content = json.loads(json.dumps(built, cls=JSONEncoder))
        _number(content["panels"])
        for item, (_, expr, _, title, text) in zip(content["annotations"]["list"], _MARKS, strict=True):
            item |= {
                "target": {"expr": expr, "refId": "Anno"},
                "titleFormat": title,
                "textFormat": text,
                "useValueForTime": False,
            }
        return json.dumps(content, indent=1, sort_keys=True) + "\n"

    def _builder(self) -> builders.Dashboard:
        board = (
            builders.Dashboard(self.title)
            .uid(PREFIX + self.name)
            .description(self.about)
            .tags([_TAG])
            .readonly()
            .refresh("10s")
            .time("now-30m", "now")
            .timezone("browser")
            .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
            .link(
                builders.DashboardLink("Boards")
                .type(dashboard.DashboardLinkType.DASHBOARDS)
                .tags([_TAG])
                .include_vars(True)
                .keep_time(True)
            )
            .variables(_variables())
            .annotations([_mark(name, expr, color) for name, expr, color, _, _ in _MARKS])
        )
        for panel in self.tiles:
            board = board.with_panel(panel)
        for row in self.rows:
            board = board.with_row(builders.Row(row.title))
            for panel in row.panels:
                board = board.with_panel(panel)
        return board


def _variables() -> list[Any]:
    return [
        builders.DatasourceVariable("datasource").label("Prometheus").type("prometheus"),
        _choice("run", "label_values(rollstream_redis_up, run)"),
        _choice("role", 'label_values(rollstream_worker_info{run="$run"}, role)', has_all=True),
        _choice("worker", 'label_values(rollstream_worker_info{run="$run", role=~"$role"}, worker)', has_all=True),
    ]


def _choice(name: str, query: str, *, has_all: bool = False) -> builders.QueryVariable:
    choice = (
        builders.QueryVariable(name)
        .label(name.capitalize())
        .query(query)
        .datasource(SOURCE)
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
    )
    if not has_all:
        return choice
    everything = dashboard.VariableOption(text="All", value="$__all", selected=True)
    return choice.multi(True).include_all(True).all_value(".*").current(everything)


def _mark(name: str, expr: str, color: str) -> builders.AnnotationQuery:
    return builders.AnnotationQuery().name(name).datasource(SOURCE).enable(True).icon_color(color).expr(expr)


def _number(panels: list[dict[str, Any]]) -> None:
    row = ""
    for panel in panels:
        row = panel["title"] if panel["type"] == "row" else row
        panel["id"] = zlib.crc32(f"{row}/{panel['type']}/{panel['title']}".encode()) % _MOST_NUMBER + 1
