"""The score in what a judge wrote.

In: its answer. Out: a finite number. An object {"score": 7} counts wherever it stands, the last one;
without one the last number of the answer does, of "7/10" or "7 out of 10" the 7.
"""

from __future__ import annotations

import json
import math
import re

from pipeline.errors import ScoringError

_OBJECT = re.compile(r"\{[^{}]*\}")
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?![\w]|\.\d)")
_BEST = re.compile(r"(?<=\d)\s*(?:/|out of|of)\s*\d+(?:\.\d+)?(?!\w)")
_MAX_SHOWN = 120


def score_in(answer: str) -> float:
    """Raises ScoringError where there is none."""
    for text in reversed(_OBJECT.findall(answer)):
        value = _value_of(text)
        if value is not None:
            return value
    numbers = [float(text) for text in _NUMBER.findall(_BEST.sub("", answer))]
    if not numbers or not math.isfinite(numbers[-1]):
        raise ScoringError(f"the judge gave no score: {answer.strip()[:_MAX_SHOWN]!r}")
    return numbers[-1]


def _value_of(text: str) -> float | None:
    try:
        value = json.loads(text).get("score")
        number = float(value) if not isinstance(value, bool) else math.nan
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return number if math.isfinite(number) else None
