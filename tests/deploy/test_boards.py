"""The boards: what is committed is what the source makes, about metrics that exist, laid out in the order of flow."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.grafana.build import DASHBOARDS as FOLDER
from deploy.grafana.build import files
from pipeline.run.metric_table import all_specs
from tests.deploy.boards import DASHBOARDS, PanelQuery, filled, queries, read
from tests.deploy.promql import DEPLOY, known, made_of, named, rules

VARIABLES = {"run": "r", "role": ".*", "worker": ".*", "__rate_interval": "20s", "__interval": "5s"}
# What no board shows: facts that are labels, and what is shown in another form.
NOT_SHOWN = {
    "rollstream_ledger_dropped",
    "rollstream_ledger_balances",
    "rollstream_stream_length",
    "rollstream_prompts_skipped_total",
}
each_board = pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: str(path.stem))


def test_boards_are_what_their_source_makes() -> None:
    wanted = files()
    assert sorted(FOLDER.glob("*.json")) == sorted(wanted)
    for path, content in wanted.items():
        assert path.read_text(encoding="utf-8") == content, "run `python -m deploy.grafana.build`"


@pytest.mark.parametrize("query", queries(), ids=lambda query: str(query.where))
def test_queries_are_about_series_that_exist(query: PanelQuery) -> None:
    names = named(query.expr)
    assert names <= known()
    assert names or "process_" in query.expr
    filled(query.expr, VARIABLES)
    assert '{run="$run"' in query.expr


def test_boards_show_every_metric() -> None:
    shown = set(itertools.chain.from_iterable(made_of(query.expr) for query in queries()))
    missing = {spec.name for spec, _ in all_specs()} - shown
    assert missing == NOT_SHOWN, "give it a panel in deploy/grafana/boards, or say here that it needs none"


@each_board
def test_a_board_begins_with_eight_tiles_and_leaves_no_panel_on_top_of_another(path: Path) -> None:
    panels = read(path)["panels"]
    first, rest = panels[:8], panels[8:]
    assert {panel["type"] for panel in first} == {"stat"}
    assert rest[0]["type"] == "row"
    assert "stat" not in {panel["type"] for panel in rest}
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels), "give one of them another title"


@each_board
def test_every_panel_says_what_to_look_for(path: Path) -> None:
    for panel in read(path)["panels"]:
        assert panel["type"] == "row" or panel["description"].endswith("."), panel["title"]


@each_board
def test_a_board_has_the_common_variables_links_and_marks(path: Path) -> None:
    board = read(path)
    assert [item["name"] for item in board["templating"]["list"]] == ["datasource", "run", "role", "worker"]
    assert [item["tags"] for item in board["links"]] == [["rollstream"]]
    assert board["uid"] == f"rollstream-{path.stem}"
    marks = board["annotations"]["list"]
    assert [item["name"] for item in marks] == ["Fleet", "Checkpoints", "Alerts"]
    for item in marks:
        assert named(filled(item["target"]["expr"], VARIABLES)) <= known()


@pytest.mark.parametrize("alert", rules("alert"), ids=lambda alert: str(alert["alert"]))
def test_an_alert_links_to_a_panel_that_shows_what_it_is_about(alert: dict[str, Any]) -> None:
    link = re.search(r"/d/rollstream-(\w+)\?.*&viewPanel=(\d+)$", alert["annotations"]["dashboard"])
    assert link is not None
    panels = {str(panel["id"]): panel for panel in read(FOLDER / f"{link[1]}.json")["panels"]}
    panel = panels[link[2]]
    shown = set().union(*(made_of(target["expr"]) for target in panel.get("targets", ())))
    about = made_of(alert["expr"])
    if not about:  # whether a worker answers at all
        assert panel["title"] == "Workers"
    elif about != {"rollstream_ledger_balances"}:  # of which the ledger itself is shown
        assert shown & about, f"{panel['title']} shows {sorted(shown)}"


def provisioned(name: str) -> dict[str, Any]:
    path = DEPLOY / "grafana" / "provisioning" / name / "rollstream.yml"
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content


def test_grafana_asks_as_often_as_prometheus_does() -> None:
    (source,) = provisioned("datasources")["datasources"]
    scrapes = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    assert source["jsonData"]["timeInterval"] == scrapes["global"]["scrape_interval"]
    (provider,) = provisioned("dashboards")["providers"]
    assert provider["options"]["path"] == "$ROLLSTREAM_DASHBOARDS"
    assert "ROLLSTREAM_DASHBOARDS=$PWD/deploy/grafana/dashboards" in (DEPLOY / "README.md").read_text(encoding="utf-8")
