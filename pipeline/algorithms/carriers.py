"""What the four tables of functions receive and return.

In and out: tensors. Shapes: N completions in the whole batch, B rows and T token columns in one
micro-batch. Nothing here holds behaviour.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from pipeline.config import AlgorithmSettings

Stats: TypeAlias = Mapping[str, Tensor]
"""Name -> value of every token, [B, T], detached; the learner averages them over usable tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RewardBatch:
    """Rewards of all completions of a step, on the CPU.

    rewards: [N] float64, 0 where not scored. is_scored: [N] bool. group_index: [N] int64, from 0.
    num_tokens: [N] int64, tokens that are trained on.
    """

    rewards: Tensor
    is_scored: Tensor
    group_index: Tensor
    num_tokens: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Correction:
    """How generator and trainer are reconciled.

    old_logprobs: [B, T] detached, what the loss forms its ratio against. weights: [B, T] detached,
    factor of every token's loss. is_usable: [B, T] bool, False where the ratio is not a number that
    can be trusted; such a token is masked and counted.
    """

    old_logprobs: Tensor
    weights: Tensor
    is_usable: Tensor
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
"""Rewards -> advantage of every completion, [N] float64; 0 where not scored."""

CorrectionFunction: TypeAlias = Callable[[Tensor, Tensor, AlgorithmSettings], Correction]
"""Trainer logprobs [B, T] (detached), generator logprobs [B, T], settings -> Correction."""

LossFunction: TypeAlias = Callable[[LossInputs, AlgorithmSettings], TokenLosses]
"""Inputs and settings -> loss of every token."""

AggregationFunction: TypeAlias = Callable[[Tensor, AlgorithmSettings], Tensor]
"""Trained tokens of every completion of the batch, [N] -> factor of each of its token losses, [N] float64."""
