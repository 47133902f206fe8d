"""Reward functions that worker processes of tests import by path."""

from __future__ import annotations

import time
from collections.abc import Sequence


def spread(prompts: Sequence[str], completions: Sequence[str], **columns: object) -> list[float]:
    """Different for each member of a group, so that no group is without variance."""
    return [float(index) for index, _ in enumerate(completions)]


def same(prompts: Sequence[str], completions: Sequence[str], **columns: object) -> list[float]:
    """The same for all: no group teaches anything."""
    return [1.0 for _ in completions]


def slow(prompts: Sequence[str], completions: Sequence[str], **columns: object) -> list[float]:
    """An eighth of a second for each completion, however many are scored in one call."""
    time.sleep(0.125 * len(completions))
    return [float(index) for index, _ in enumerate(completions)]


def hangs_at_times(prompts: Sequence[str], completions: Sequence[str], **columns: object) -> list[float]:
    """Never returns for every fourth prompt."""
    if sum(map(ord, prompts[0])) % 4 == 0:
        time.sleep(3600)
    return [float(index) for index, _ in enumerate(completions)]


def vowels(prompts: Sequence[str], completions: Sequence[str], **columns: object) -> list[float]:
    """Share of vowels: depends on every character, and on nothing else."""
    return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in completions]


def same_for_half(prompts: Sequence[str], completions: Sequence[str], **columns: object) -> list[float]:
    """The same for all members of every second prompt's group."""
    if sum(map(ord, prompts[0])) % 2 == 0:
        return [1.0 for _ in completions]
    return [float(index) for index, _ in enumerate(completions)]


def one_number(prompts: Sequence[str], completions: Sequence[str], **columns: object) -> float:
    """Not what a reward function returns."""
    return 1.0


def one_value(prompts: Sequence[str], completions: Sequence[str], **columns: object) -> list[float]:
    """One value, however many completions there are."""
    return [1.0]


def needs_answers(
    prompts: Sequence[str], completions: Sequence[str], answer: list[str], **columns: object
) -> list[float]:
    """Nothing without a column that may not be there."""
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def always_raises(prompts: Sequence[str], completions: Sequence[str], **columns: object) -> list[float]:
    """A mistake in the function."""
    raise KeyError("solution")


def raises_at_times(prompts: Sequence[str], completions: Sequence[str], **columns: object) -> list[float]:
    """A mistake that every second prompt shows."""
    if sum(map(ord, prompts[0])) % 2 == 0:
        raise KeyError("solution")
    return [float(index) for index, _ in enumerate(completions)]
