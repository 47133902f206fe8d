"""The loss of every token of a micro-batch, put together from an algorithm's parts.

In: logprobs of trainer, generator and reference, advantages and a mask, [B, T]. Out: token losses,
exactly 0 where masked, and what there is to know about them. A non-finite input masks its token
and reaches neither loss nor gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.algorithms.carriers import (
    AdvantageFunction,
    AggregationFunction,
    CorrectionFunction,
    LossFunction,
    LossInputs,
    Stats,
)
from pipeline.algorithms.ratios import k3
from pipeline.config import AlgorithmSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One function of each table."""

    advantage: AdvantageFunction
    loss: LossFunction
    correction: CorrectionFunction
    aggregation: AggregationFunction


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenInputs:
    """One micro-batch, all [B, T]. ref_logprobs: only where there is a KL term. mask: bool."""

    trainer_logprobs: Tensor
    generator_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    ref_logprobs: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Objective:
    """losses: [B, T], 0 outside `mask`. mask: [B, T] bool, the given mask less unusable tokens."""

    losses: Tensor
    mask: Tensor
    stats: Stats


def evaluate(algorithm: Algorithm, inputs: TokenInputs, settings: AlgorithmSettings) -> Objective:
    """loss_t = weight_t * policy_loss_t + kl_coef * k3_t.

    k3 is the estimate of KL(policy || reference) of arXiv 2402.03300, without the importance weight.
    """
    trainer = _finite(inputs.trainer_logprobs)
    current = trainer.detach()
    correction = algorithm.correction(inputs.trainer_logprobs.detach(), inputs.generator_logprobs, settings)
    mask = inputs.mask & correction.is_usable
    generator = torch.where(correction.is_usable, inputs.generator_logprobs, current)
    policy = algorithm.loss(
        LossInputs(
            trainer_logprobs=trainer,
            old_logprobs=_finite(correction.old_logprobs),
            advantages=inputs.advantages,
            mask=mask,
        ),
        settings,
    )
    losses = correction.weights * policy.losses
    stats = (
        dict(correction.stats)
        | dict(policy.stats)
        | {
            "importance_ratio": (current - generator).exp(),
            "mismatch_kl": k3(current - generator),
        }
    )
    if inputs.ref_logprobs is not None:
        divergence = k3(_finite(inputs.ref_logprobs) - trainer)
        mask = mask & torch.isfinite(inputs.ref_logprobs)
        losses = losses + settings.kl_coef * divergence
        stats["kl"] = divergence.detach()
    return Objective(losses=torch.where(mask, losses, 0.0), mask=mask, stats=stats)


def _finite(logprobs: Tensor) -> Tensor:
    """Logprobs [B, T] with 0 where they are not finite; no gradient flows there."""
    return torch.where(torch.isfinite(logprobs), logprobs, 0.0)
