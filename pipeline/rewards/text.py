"""Shipped rewards that look at the text alone.

In: completions, and for some a column of the data set. Out: 1.0, 0.0 or what lies between; None
where a row has nothing to compare with, so that the reward does not apply.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, cast

from pipeline.rewards.columns import Completions, column, texts_of


def exact_match(
    prompts: Sequence[Any],
    completions: Completions,
    *,
    answer_column: str = "answer",
    ignore_case: bool = False,
    **columns: Any,
) -> list[float | None]:
    """1.0 where the completion is the answer, else 0.0; None where the row has no answer.

    White space around both does not count. Column `answer` (see answer_column): a text, a number,
    or a list of answers that are all right.
    """

    def normal(text: object) -> str:
        stripped = str(text).strip()
        return stripped.casefold() if ignore_case else stripped

    def score(text: str, answer: object) -> float | None:
        if answer is None:
            return None
        answers = answer if isinstance(answer, list) else [answer]
        return float(normal(text) in {normal(right) for right in answers})

    answers = column(columns, answer_column, len(completions))
    return [score(text, answer) for text, answer in zip(texts_of(completions), answers, strict=True)]


def format(
    prompts: Sequence[Any], completions: Completions, *, pattern: str, whole: bool = True, **columns: Any
) -> list[float]:
    """1.0 where the regular expression `pattern` matches the completion, else 0.0.

    whole: the pattern must cover the whole completion; else it may occur anywhere. A dot matches
    line ends too.
    """
    try:
        expression = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"pattern = {pattern!r} is not a regular expression: {error}") from error
    matches = expression.fullmatch if whole else expression.search
    return [float(matches(text) is not None) for text in texts_of(completions)]


def length(
    prompts: Sequence[Any],
    completions: Completions,
    completion_ids: Sequence[Sequence[int]] = (),
    *,
    unit: Literal["tokens", "words", "characters"] = "tokens",
    at_least: int = 0,
    at_most: int = 0,
    slack: int = 0,
    **columns: Any,
) -> list[float]:
    """1.0 where the length is within [at_least, at_most], falling linearly to 0.0 `slack` beyond.

    at_most: 0 sets no upper bound. unit: tokens, words or characters.
    """
    _check_bounds(unit, at_least, at_most, slack)

    def score(size: int) -> float:
        too_few = at_least - size
        too_many = size - at_most if at_most else 0
        beyond = max(too_few, too_many, 0)
        return max(0.0, 1.0 - beyond / (slack + 1))

    match unit:
        case "tokens":
            sizes = [len(ids) for ids in completion_ids]
        case "words":
            sizes = [len(text.split()) for text in texts_of(completions)]
        case "characters":
            sizes = [len(text) for text in texts_of(completions)]
    return [score(size) for size in sizes]


def _check_bounds(unit: str, at_least: int, at_most: int, slack: int) -> None:
    if unit not in {"tokens", "words", "characters"}:
        raise ValueError(f'unit = {unit!r}: use "tokens", "words" or "characters"')
    if min(at_least, at_most, slack) < 0:
        raise ValueError("at_least, at_most and slack are 0 or more")
    if at_most and at_least > at_most:
        raise ValueError(f"at_least = {at_least} is above at_most = {at_most}")


def choice(
    prompts: Sequence[Any],
    completions: Completions,
    *,
    choices: Sequence[str] | Sequence[list[str]] = ("A", "B", "C", "D"),
    answer_column: str = "answer",
    **columns: Any,
) -> list[float | None]:
    """1.0 where the last of `choices` named in the completion is the answer, else 0.0.

    A choice counts where it stands as a word of its own: "B", "(B)", "Answer: B.". None where the
    row has no answer. Column `answer` (see answer_column): one of the choices. A column `choices`
    gives each row its own, unless the settings name them.
    """
    if not choices or not all(choices):
        raise ValueError("choices is empty or holds an empty text")

    def score(text: str, options: Sequence[str], answer: object) -> float | None:
        if answer is None:
            return None
        if str(answer) not in options:
            raise ValueError(f"the answer {answer!r} is not among choices = {list(options)}")
        mentioned = _standing_alone(options).findall(text)
        return float(bool(mentioned) and mentioned[-1] == str(answer))

    answers = column(columns, answer_column, len(completions))
    rows = cast("Sequence[Sequence[str]]", choices if isinstance(choices[0], list) else [choices] * len(completions))
    return [score(*row) for row in zip(texts_of(completions), rows, answers, strict=True)]


def _standing_alone(options: Sequence[str]) -> re.Pattern[str]:
    """Matches an option that is no part of a longer word; of two that fit, the longer."""
    longest_first = sorted(options, key=len, reverse=True)
    return re.compile(rf"(?<!\w)(?:{'|'.join(re.escape(option) for option in longest_first)})(?!\w)")
