"""From what each function said of a completion to its one reward.

In: `RewardResult`s of one completion. Out: its `Score`. A function that does not apply (None) stays
out of the sum; one that failed decides by the settings. Rewards of tokens are summed token by token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from pipeline.messages import Floats, RewardResult, Score


def combine(parts: Sequence[RewardResult], weights: Sequence[float], on_failure: Literal["unscored", "zero"]) -> Score:
    """Weighted sum of the functions that apply; None where none applies.

    A failed function makes the sum meaningless: the completion is left unscored or gets 0.
    """
    if any(part.outcome.is_failure for part in parts):
        return Score(reward=0.0 if on_failure == "zero" else None, parts=tuple(parts))
    terms = [weight * part.value for part, weight in zip(parts, weights, strict=True) if part.value is not None]
    reward = math.fsum(terms) if terms else None
    return Score(reward=reward, parts=tuple(parts), token_rewards=_token_rewards(parts, weights))


def _token_rewards(parts: Sequence[RewardResult], weights: Sequence[float]) -> Floats | None:
    """Weighted sum at each token [T] over the functions with a step that ends there; NaN without any."""
    judged = [
        weight * np.array(part.token_values, dtype=np.float64)
        for part, weight in zip(parts, weights, strict=True)
        if part.token_values is not None
    ]
    if not judged:
        return None
    rows = np.stack(judged)  # [K, T]
    is_step_end = np.isfinite(rows).any(axis=0)
    return np.where(is_step_end, np.nansum(rows, axis=0), np.nan).astype(np.float32)
