"""The loss of every token of a micro-batch, put together from an algorithm's parts.

In: logprobs of trainer, generator and reference, advantages and a mask, [B, T]. Out: token losses,
exactly 0 where masked, and what there is to know about them. A non-finite input masks its token
and reaches neither loss nor gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.algorithms.carriers import (
    AdvantageFunction,
    AggregationFunction,
    CorrectionFunction,
    CorrectionInputs,
    LossFunction,
    LossInputs,
    ProximalFunction,
    Stats,
)
from pipeline.algorithms.distillation import reverse_kl_advantages
from pipeline.algorithms.divergences import k3
from pipeline.algorithms.proximal import generator as generator_is_proximal
from pipeline.algorithms.ratios import bounded_exp, usable_ratios
from pipeline.config import AlgorithmSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One function of each table, and the settings with every choice filled in."""

    advantage: AdvantageFunction
    loss: LossFunction
    correction: CorrectionFunction
    aggregation: AggregationFunction
    proximal: ProximalFunction
    divergence: Callable[[Tensor], Tensor]
    settings: AlgorithmSettings

    def anchor(self, trainer: Tensor, generator: Tensor, ages: Tensor) -> Tensor:
        """What the correction holds against the generator, [B, T]: the proximal policy, or the trainer
        where the generator itself is the proximal policy."""
        if self.proximal is generator_is_proximal:
            return trainer
        return self.proximal(trainer, generator, ages)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenInputs:
    """One micro-batch, all [B, T]. mask: bool. ages: int64. ref_logprobs: only where there is a KL term.
    limit: of m2po, from the whole batch. teacher_logprobs: NaN where no teacher has said anything; only where
    there is one. teacher_jsd, teacher_top_mass: as of `generalized_jsd`; only where jsd_coef asks for them."""

    trainer_logprobs: Tensor
    generator_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    ages: Tensor
    ref_logprobs: Tensor | None = None
    limit: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    teacher_jsd: Tensor | None = None
    teacher_top_mass: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Objective:
    """losses: [B, T], 0 outside `mask`. mask: [B, T] bool, the given mask less unusable tokens.
    log_ratios: [B, T] detached, log of trainer over generator, 0 where unusable."""

    losses: Tensor
    mask: Tensor
    log_ratios: Tensor
    stats: Stats


def evaluate(algorithm: Algorithm, inputs: TokenInputs) -> Objective:
    """loss_t = weight_t * policy_loss_t + jsd_coef * jsd_t + kl_coef * k_t, the last only with kl_in = "loss"."""
    trainer = _finite(inputs.trainer_logprobs)
    current = trainer.detach()
    is_usable = usable_ratios(inputs.trainer_logprobs, inputs.generator_logprobs)
    generator = torch.where(is_usable, inputs.generator_logprobs, current)
    mask = inputs.mask & is_usable
    if inputs.ref_logprobs is not None:
        mask = mask & torch.isfinite(inputs.ref_logprobs)
    advantages, taught = _with_teacher(algorithm, inputs, current)
    anchor = algorithm.anchor(current, generator, inputs.ages)
    correction = algorithm.correction(
        CorrectionInputs(
            log_ratios=torch.where(mask, anchor - generator, 0.0),
            advantages=advantages,
            mask=mask,
            limit=inputs.limit,
        ),
        algorithm.settings,
    )
    policy = algorithm.loss(
        LossInputs(
            trainer_logprobs=trainer,
            old_logprobs=algorithm.proximal(current, generator, inputs.ages),
            advantages=advantages,
            mask=mask,
        ),
        algorithm.settings,
    )
    losses = correction.weights * policy.losses
    log_ratios = current - generator
    stats = {**correction.stats, **policy.stats, **taught}
    stats |= {"importance_ratio": log_ratios.exp(), "mismatch_kl": k3(log_ratios)}
    if inputs.teacher_jsd is not None and inputs.teacher_top_mass is not None:
        # Weighed by no ratio: at the token's prefix it is exact, whoever has drawn the token.
        losses = losses + algorithm.settings.jsd_coef * inputs.teacher_jsd
        stats["teacher_jsd"], stats["teacher_top_mass"] = inputs.teacher_jsd.detach(), inputs.teacher_top_mass
        stats["top_taught"] = (inputs.teacher_top_mass > 0).to(current.dtype)
    if inputs.ref_logprobs is not None:
        divergence = algorithm.divergence(_finite(inputs.ref_logprobs) - trainer)
        stats["kl"] = divergence.detach()
        if algorithm.settings.kl_in == "loss":
            losses = losses + algorithm.settings.kl_coef * _weighed(divergence, trainer - generator, algorithm.settings)
    return Objective(losses=torch.where(mask, losses, 0.0), mask=mask, log_ratios=log_ratios, stats=stats)


def _with_teacher(algorithm: Algorithm, inputs: TokenInputs, current: Tensor) -> tuple[Tensor, Stats]:
    """Advantages [B, T] with distillation_coef times the teacher's part, and what there is to know of it."""
    if not algorithm.settings.distillation:
        return inputs.advantages, {}
    if inputs.teacher_logprobs is None:  # in this micro-batch: another rank's may have them
        return inputs.advantages, {"teacher_kl": torch.zeros_like(current), "taught": torch.zeros_like(current)}
    gains = reverse_kl_advantages(inputs.teacher_logprobs, current)
    is_taught = (~torch.isnan(inputs.teacher_logprobs)).to(gains.dtype)
    return inputs.advantages + algorithm.settings.distillation * gains, {"teacher_kl": -gains, "taught": is_taught}


def _weighed(divergence: Tensor, log_ratios: Tensor, settings: AlgorithmSettings) -> Tensor:
    """rho k with the gradient through rho as well, where asked for: over tokens of the generator its
    mean is that of k over tokens of the policy, and so is its gradient. Source: the unbiased KL
    estimate of DeepSeek-V3.2, arXiv 2512.02556."""
    return bounded_exp(log_ratios) * divergence if settings.kl_importance else divergence


def _finite(logprobs: Tensor) -> Tensor:
    """Logprobs [B, T] with 0 where they are not finite; no gradient flows there."""
    return torch.where(torch.isfinite(logprobs), logprobs, 0.0)
