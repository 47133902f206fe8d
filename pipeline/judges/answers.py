"""The score in what a judge wrote.

In: its answer. Out: a number. An object {"score": 7} counts wherever it stands, the last one; without
one the last number of the answer does.
"""

from __future__ import annotations

import json
import math
import re

from pipeline.errors import ScoringError

_OBJECT = re.compile(r"\{[^{}]*\}")
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?![\w]|\.\d)")
_MAX_SHOWN = 120


def score_in(answer: str) -> float:
    """Raises ScoringError where there is none."""
    for text in reversed(_OBJECT.findall(answer)):
        value = _value_of(text)
        if value is not None:
            return value
    numbers = _NUMBER.findall(answer)
    if not numbers:
        raise ScoringError(f"the judge gave no score: {answer.strip()[:_MAX_SHOWN]!r}")
    return float(numbers[-1])


def _value_of(text: str) -> float | None:
    try:
        value = json.loads(text).get("score")
        number = float(value) if not isinstance(value, bool) else math.nan
    except (ValueError, TypeError, AttributeError):
        return None
    return number if math.isfinite(number) else None
