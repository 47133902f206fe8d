"""A reward function whose moods are set from outside, by what is written into a file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

SLOW_S = 0.4


def moody(prompts: Sequence[str], completions: Sequence[str], mood: str, **columns: object) -> list[float]:
    """Different for each member of a group. mood: path of the file; it says "slow", "failing" or nothing."""
    path = Path(mood)
    said = path.read_text() if path.exists() else ""
    if said == "slow":
        time.sleep(SLOW_S)
    if said == "failing":
        raise ValueError("this reward fails for a while")
    return [float(index) for index, _ in enumerate(completions)]
