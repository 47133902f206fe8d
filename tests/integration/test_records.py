"""What a run writes into metrics.jsonl is what the documentation says it writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.records.fields import FIELDS, render_table

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


def assert_described(rows: Sequence[dict[str, Any]]) -> None:
    """Every field of a run's records is described, and every description has a field: for a run that evaluates."""
    written = set[str]().union(*rows)
    assert written <= {field.name for field in FIELDS}
    assert written >= {field.name for field in FIELDS if not field.is_occasional}


def test_the_table_in_the_documentation_is_the_one_in_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert render_table() in text, "put there what `python -m pipeline.records.fields` prints"
