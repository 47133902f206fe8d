"""Batches for the tables of functions, small enough to check by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pipeline.algorithms import RewardBatch
from pipeline.algorithms.carriers import CorrectionInputs, LossInputs


def reward_batch(
    groups: Sequence[Sequence[float | None]],
    *,
    lengths: Sequence[int] | None = None,
    parts: Sequence[Sequence[float | None]] = (),
    weights: Sequence[float] = (),
    mask: Sequence[int] | None = None,
    token_rewards: Sequence[float] | None = None,
    penalties: Sequence[float] | None = None,
    shaping: Sequence[float] | None = None,
) -> RewardBatch:
    """One completion for each reward, each of one token. parts: for each completion the value of every function."""
    flat = [reward for group in groups for reward in group]
    sizes = [1] * len(flat) if lengths is None else list(lengths)
    return RewardBatch(
        rewards=doubles([reward or 0.0 for reward in flat]),
        shaping=doubles([0.0] * len(flat) if shaping is None else shaping),
        is_scored=torch.tensor([reward is not None for reward in flat], dtype=torch.bool),
        group_index=torch.tensor([index for index, group in enumerate(groups) for _ in group], dtype=torch.int64),
        lengths=torch.tensor(sizes, dtype=torch.int64),
        mask=torch.tensor([1] * sum(sizes) if mask is None else list(mask), dtype=torch.bool),
        parts=doubles([value or 0.0 for row in parts for value in row]).view(len(flat), len(weights)),
        has_part=torch.tensor([value is not None for row in parts for value in row], dtype=torch.bool).view(
            len(flat), len(weights)
        ),
        part_weights=doubles(weights),
        token_rewards=None if token_rewards is None else doubles(token_rewards),
        penalties=None if penalties is None else doubles(penalties),
    )


def without_reward(batch: RewardBatch, row: int) -> RewardBatch:
    """The batch in which one completion has no reward."""
    is_scored = batch.is_scored.clone()
    is_scored[row] = False
    return replace(batch, is_scored=is_scored)


def loss_inputs(trainer: Tensor, old: Tensor, advantages: Tensor, mask: Tensor | None = None) -> LossInputs:
    """All [B, T]; every token is trained on unless a mask says otherwise."""
    everything = torch.ones_like(old, dtype=torch.bool)
    return LossInputs(
        trainer_logprobs=trainer, old_logprobs=old, advantages=advantages, mask=everything if mask is None else mask
    )


def correction_inputs(
    log_ratios: Tensor, advantages: Tensor | None = None, mask: Tensor | None = None, limit: float | None = None
) -> CorrectionInputs:
    """All [B, T]; advantages of 1 and every token trained on unless said otherwise."""
    return CorrectionInputs(
        log_ratios=log_ratios,
        advantages=torch.ones_like(log_ratios) if advantages is None else advantages,
        mask=torch.ones_like(log_ratios, dtype=torch.bool) if mask is None else mask,
        limit=None if limit is None else torch.tensor(limit),
    )


def doubles(values: Sequence[float]) -> Tensor:
    """float64."""
    return torch.tensor(list(values), dtype=torch.float64)
