"""Recording rules and alerts: valid, about metrics that exist, and each alert fires when it should and only then."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.promql import PROMETHEUS, known, named, rules

ALERTS = rules("alert")
CASES = sorted((PROMETHEUS / "tests").glob("*.yml"))
RULES = [pytest.param(rule, id=rule.get("alert") or rule["record"]) for rule in (*rules("record"), *ALERTS)]


@pytest.fixture(scope="session")
def promtool() -> str:
    """Prometheus's own checker; skips where it is not installed."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian's package prometheus has it)")
    return program


def checked(*words: str | Path) -> str:
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def cases() -> list[dict[str, Any]]:
    return [case for file in CASES for case in yaml.safe_load(file.read_text(encoding="utf-8"))["tests"]]


def test_prometheus_accepts_its_settings_and_all_rules(promtool: str) -> None:
    said = checked(promtool, "check", "config", PROMETHEUS / "prometheus.yml")
    assert f"{len(ALERTS)} rules found" in said


@pytest.mark.parametrize("cases", CASES, ids=lambda path: str(path.stem))
def test_alerts_fire_in_one_case_and_are_silent_in_the_other(promtool: str, cases: Path) -> None:
    checked(promtool, "test", "rules", cases)


@pytest.mark.parametrize("alert", [rule["alert"] for rule in ALERTS])
def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not(alert: str) -> None:
    expected = {True: 1, False: 0}
    found = {True: 0, False: 0}
    for case in cases():
        for test in case["promql_expr_test"]:
            if f'"{alert}"' in test["expr"]:
                fires = case["name"].startswith(f"{alert} fires")
                assert test["exp_samples"] == [{"labels": "{}", "value": expected[fires]}]
                found[fires] += 1
    assert min(found.values()) >= 1


@pytest.mark.parametrize("rule", RULES)
def test_rules_are_about_series_that_exist(rule: dict[str, Any]) -> None:
    assert named(rule["expr"]) <= known()
    assert named(rule["expr"]) or "up{" in rule["expr"]


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: str(rule["alert"]))
def test_an_alert_says_what_is_wrong_of_which_run_and_where_to_look(rule: dict[str, Any]) -> None:
    said = rule["annotations"]
    assert set(said) == {"summary", "description", "dashboard"}
    assert "$labels.run" in said["summary"]
    assert said["description"].endswith(".")
    assert rule["labels"]["severity"] in {"warning", "critical"}
    assert "/d/rollstream-" in said["dashboard"]
    assert "?var-run={{ $labels.run }}&viewPanel=" in said["dashboard"]


def test_every_alert_is_explained_where_one_begins_to_watch() -> None:
    page = (PROMETHEUS.parent / "README.md").read_text(encoding="utf-8")
    assert [rule["alert"] for rule in ALERTS] == re.findall(r"^\| (Rollstream\w+) \|", page, re.MULTILINE)
