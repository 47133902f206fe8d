"""What expressions of rules, alerts and boards name, and what there is to be named.

In: PromQL. Out: names of series, as text; nothing is evaluated.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from pipeline.instruments import Kind
from pipeline.run.metric_table import all_specs

DEPLOY = Path(__file__).parents[2] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
_NAME = re.compile(r"(?:[a-z_]+:)?rollstream_[a-z0-9_]+(?::[a-z0-9_]+)?")


def rules(kind: str) -> list[dict[str, Any]]:
    """All rules with the key `kind`: `record` or `alert`."""
    return [rule for rule in _all_rules() if kind in rule]


@cache
def _all_rules() -> tuple[dict[str, Any], ...]:
    """Read once: hundreds of tests ask."""
    files = sorted((PROMETHEUS / "rules").glob("*.yml"))
    groups = [group for file in files for group in yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]]
    return tuple(rule for group in groups for rule in group["rules"])


def named(expression: str) -> set[str]:
    """Series of ours that an expression names."""
    return set(_NAME.findall(expression))


def made_of(expression: str) -> set[str]:
    """Metrics that an expression is made of: behind recorded names, and without the endings of histograms."""
    recorded = {rule["record"]: rule["expr"] for rule in rules("record")}
    found: set[str] = set()
    for name in named(expression):
        found |= made_of(recorded[name]) if name in recorded else {re.sub(r"_(bucket|sum|count)$", "", name)}
    return found


def known() -> set[str]:
    """Series that workers and the exporter serve, and those that rules record."""
    names = {rule["record"] for rule in rules("record")}
    for spec, _ in all_specs():
        suffixes = ("_bucket", "_sum", "_count") if spec.kind is Kind.HISTOGRAM else ("",)
        names |= {spec.name + suffix for suffix in suffixes}
    return names
