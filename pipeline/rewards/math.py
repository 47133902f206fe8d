"""Shipped reward for mathematics: is the final answer equal to the right one?

In: completions and the right answers. Out: 1.0, 0.0, or None where the right answer itself cannot
be read. Needs math-verify (the extra `math`), which compares values, not spellings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.errors import RewardLoadError
from pipeline.rewards.columns import Completions, column, texts_of

_SECONDS_EACH = 2


def math(
    prompts: Sequence[Any],
    completions: Completions,
    *,
    answer_column: str = "answer",
    **columns: Any,
) -> list[float | None]:
    r"""1.0 where the last answer in the completion equals the row's answer, else 0.0.

    Understands numbers, LaTeX and \boxed{...}; `1/2`, `0.5` and `\frac{1}{2}` are equal. None
    where the row's answer is missing or not mathematics. An expression on which the comparison
    takes more than two seconds counts as wrong. Column `answer` (see answer_column).
    """
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise RewardLoadError("the reward 'math' needs math-verify: pip install rollstream[math]") from error

    def score(text: str, answer: object) -> float | None:
        right = parse(_as_mathematics(answer), parsing_timeout=_SECONDS_EACH) if answer is not None else []
        if not right:
            return None
        given = parse(text, parsing_timeout=_SECONDS_EACH)
        return float(bool(given) and verify(right, given, timeout_seconds=_SECONDS_EACH))

    answers = column(columns, answer_column, len(completions))
    return [score(text, answer) for text, answer in zip(texts_of(completions), answers, strict=True)]


def _as_mathematics(answer: object) -> str:
    """A bare answer as LaTeX; one that brings its own delimiters stays as it is."""
    text = str(answer).strip()
    has_delimiters = any(sign in text for sign in ("$", "\\boxed", "\\(", "\\["))
    return text if has_delimiters else f"${text}$"
