"""What the tables of functions receive and return.

In and out: tensors. Shapes: N completions in the whole batch and M token positions in all of them,
one completion after the other; B rows and T token columns in one micro-batch, each row a completion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from pipeline.config import AlgorithmSettings

Stats: TypeAlias = Mapping[str, Tensor]
"""Name -> value of every token, [B, T], detached; the learner averages them over usable tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RewardBatch:
    """Rewards of all completions of a step, on the CPU.

    rewards: [N] float64, shaped, 0 where not scored. shaping: [N], what was added to them.
    is_scored: [N] bool. group_index: [N] int64, from 0.
    lengths: [N] int64, token positions of each. mask: [M] bool, tokens that are trained on.
    parts, has_part: [N, K], what each of K reward functions gave, 0 where it did not. part_weights: [K].
    token_rewards: [M] float64, NaN where a token has none; None where no score has any.
    penalties: [M] float64, taken off the reward at each token; None where nothing is.
    """

    rewards: Tensor
    shaping: Tensor
    is_scored: Tensor
    group_index: Tensor
    lengths: Tensor
    mask: Tensor
    parts: Tensor
    has_part: Tensor
    part_weights: Tensor
    token_rewards: Tensor | None = None
    penalties: Tensor | None = None

    @property
    def row_index(self) -> Tensor:
        """Completion of each token, [M]."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), self.lengths)

    @property
    def num_tokens(self) -> Tensor:
        """Trained tokens of each completion, [N] int64."""
        return self.sum_of(self.mask.long())

    @property
    def outcomes(self) -> Tensor:
        """What each completion has earned as a whole, [N]: its reward less its penalties."""
        if self.penalties is None:
            return self.rewards
        return torch.where(self.is_scored, self.rewards - self.sum_of(self.penalties * self.mask), 0.0)

    def spread(self, values: Tensor) -> Tensor:
        """A value of each completion [N] at all of its tokens, [M]."""
        return values[self.row_index]

    def sum_of(self, values: Tensor) -> Tensor:
        """Values of tokens [M] summed in each completion, [N]."""
        return values.new_zeros(len(self.lengths)).index_add(0, self.row_index, values)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchShape:
    """What an aggregation knows. num_tokens: [N] int64, trained tokens of each completion of the batch.
    max_tokens: limit of a completion."""

    num_tokens: Tensor
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CorrectionInputs:
    """What a correction sees of one micro-batch.

    log_ratios: [B, T] detached, 0 where `mask` is not: log of what the loss forms its ratio against
    over the generator, or of the trainer over the generator where these two are the same.
    advantages: [B, T]. mask: [B, T] bool. limit: of m2po, from the whole batch.
    """

    log_ratios: Tensor
    advantages: Tensor
    mask: Tensor
    limit: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Correction:
    """How generator and trainer are reconciled.

    weights: [B, T] detached, factor of every token's loss; 0 where the token is masked.
    """

    weights: Tensor
    stats: Stats = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """What a policy loss sees of one micro-batch, everywhere finite.

    trainer_logprobs: [B, T] with gradient. old_logprobs, advantages: [B, T]. mask: [B, T] bool.
    """

    trainer_logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLosses:
    """losses: [B, T] with gradient, neither masked nor averaged."""

    losses: Tensor
    stats: Stats = field(default_factory=dict)


AdvantageFunction: TypeAlias = Callable[[RewardBatch, AlgorithmSettings], Tensor]
"""Rewards -> advantage of every token, [M] float64; 0 in completions without a reward."""

ProximalFunction: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Trainer logprobs (detached), generator logprobs, ages, [B, T] -> what the loss forms its ratio against."""

CorrectionFunction: TypeAlias = Callable[[CorrectionInputs, AlgorithmSettings], Correction]
"""Log-ratios of one micro-batch -> weights."""

LossFunction: TypeAlias = Callable[[LossInputs, AlgorithmSettings], TokenLosses]
"""Inputs and settings -> loss of every token."""

AggregationFunction: TypeAlias = Callable[[BatchShape, AlgorithmSettings], Tensor]
"""Trained tokens of every completion of the batch -> factor of each of its token losses, [N] float64."""
