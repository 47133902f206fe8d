"""From the samples of a step to what an advantage function sees.

In: samples, and the weights of the reward functions. Out: a `RewardBatch`, with long completions
shaped where the settings ask for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pipeline.algorithms import BatchShape, RewardBatch
from pipeline.batching import Sample
from pipeline.config import AlgorithmSettings


def reward_batch(
    samples: Sequence[Sample],
    settings: AlgorithmSettings,
    *,
    weights: Mapping[str, float],
    penalties: Tensor | None = None,
) -> RewardBatch:
    """Rewards of all samples. settings: resolved. weights: of reward functions by name; 1 where not named.
    penalties: [M], see `RewardBatch`."""
    names = list(dict.fromkeys(part.name for sample in samples for part in sample.score.parts))
    parts = [_parts(sample, names) for sample in samples]
    is_scored = torch.tensor([sample.reward is not None for sample in samples], dtype=torch.bool)
    shaping = torch.tensor([-_overlong(sample, settings) for sample in samples], dtype=torch.float64)
    shaping = torch.where(is_scored, shaping, 0.0)
    rewards = torch.tensor([sample.reward or 0.0 for sample in samples], dtype=torch.float64)
    shape = (len(samples), len(names))
    return RewardBatch(
        rewards=rewards + shaping,
        shaping=shaping,
        is_scored=is_scored,
        group_index=torch.tensor([sample.group_index for sample in samples], dtype=torch.int64),
        lengths=torch.tensor([len(sample.mask) for sample in samples], dtype=torch.int64),
        mask=_joined([torch.from_numpy(sample.mask) for sample in samples], torch.bool),
        parts=torch.tensor([[value or 0.0 for value in row] for row in parts], dtype=torch.float64).view(shape),
        has_part=torch.tensor([[value is not None for value in row] for row in parts], dtype=torch.bool).view(shape),
        part_weights=torch.tensor([weights.get(name, 1.0) for name in names], dtype=torch.float64),
        token_rewards=_token_rewards(samples),
        penalties=penalties,
    )


def batch_shape(samples: Sequence[Sample]) -> BatchShape:
    """What an aggregation knows of the samples."""
    return BatchShape(
        num_tokens=torch.tensor([sample.num_tokens for sample in samples], dtype=torch.int64),
        max_tokens=max((sample.max_tokens for sample in samples), default=1),
    )


def num_overlong(samples: Sequence[Sample], settings: AlgorithmSettings) -> int:
    """Completions that lose reward for their length. settings: resolved."""
    return sum(_overlong(sample, settings) > 0 for sample in samples if sample.reward is not None)


def _overlong(sample: Sample, settings: AlgorithmSettings) -> float:
    """overlong_penalty * min(1, (T - (L - b)) / b) for T > L - b tokens, with the limit L and the buffer
    b = overlong_buffer * L, else 0. Source: soft overlong punishment of DAPO, arXiv 2503.14476."""
    if settings.overlong is not True:
        return 0.0
    buffer = settings.overlong_buffer * sample.max_tokens
    excess = len(sample.completion) - (sample.max_tokens - buffer)
    return settings.overlong_penalty * min(1.0, max(0.0, excess / buffer))


def _parts(sample: Sample, names: Sequence[str]) -> list[float | None]:
    """What each function gave; 0 from all of them where one failed, and a reward of 0 was made of that."""
    if any(part.outcome.is_failure for part in sample.score.parts):
        return [0.0] * len(names)
    given = {part.name: part.value for part in sample.score.parts}
    return [given.get(name) for name in names]


def _token_rewards(samples: Sequence[Sample]) -> Tensor | None:
    """[M] float64, NaN where there is none; None where no score has any."""
    if all(sample.score.token_rewards is None for sample in samples):
        return None
    rows = [
        torch.full((len(sample.mask),), torch.nan, dtype=torch.float64)
        if sample.score.token_rewards is None
        else torch.tensor(sample.score.token_rewards, dtype=torch.float64)
        for sample in samples
    ]
    return _joined(rows, torch.float64)


def _joined(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(list(parts)) if parts else torch.zeros(0, dtype=dtype)
