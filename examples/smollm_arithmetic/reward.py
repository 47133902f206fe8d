"""Is the last number that the assistant names the right one?"""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBER = re.compile(r"-?\d+")


def last_number(
    prompts: Sequence[list[dict[str, str]]],
    completions: Sequence[list[dict[str, str]]],
    answer: Sequence[int],
    **columns: object,
) -> list[float]:
    """1.0 where the last number in the completion is the answer, else 0.0."""
    return [
        float(_last(completion[-1]["content"]) == right) for completion, right in zip(completions, answer, strict=True)
    ]


def _last(text: str) -> int | None:
    numbers = _NUMBER.findall(text.replace(",", ""))
    return int(numbers[-1]) if numbers else None
