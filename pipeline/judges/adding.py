"""From what functions and judges said of a completion to its one reward.

In: a score by functions, and what judges say. Out: the score with both.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from pipeline.messages import RewardResult, Score


def with_judgements(
    score: Score, judgements: Sequence[RewardResult], weights: Sequence[float], on_failure: Literal["unscored", "zero"]
) -> Score:
    """The weighted sum of all that apply; None where none does.

    A judge that failed makes the sum meaningless, as a function does: the completion is left unscored or gets 0.
    """
    parts = (*score.parts, *judgements)
    if any(part.outcome.is_failure for part in parts):
        return dataclasses.replace(score, reward=0.0 if on_failure == "zero" else None, parts=parts)
    terms = [weight * part.value for part, weight in zip(judgements, weights, strict=True) if part.value is not None]
    if score.reward is not None:
        terms.append(score.reward)
    return dataclasses.replace(score, reward=math.fsum(terms) if terms else None, parts=parts)
