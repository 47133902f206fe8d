"""Policy losses of single tokens.

In: trainer logprobs with gradient, old logprobs, advantages, [B, T]. Out: a loss for every token,
not masked and not averaged; that is the aggregation's part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.algorithms.carriers import LossFunction, LossInputs, TokenLosses
from pipeline.algorithms.ratios import bounded_exp
from pipeline.algorithms.sequence_losses import gmpo, gspo, topr
from pipeline.config import AlgorithmSettings


def ppo_clip(inputs: LossInputs, settings: AlgorithmSettings) -> TokenLosses:
    """-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) with rho = exp(log pi - log pi_old).

    With dual_clip = c and A < 0 the loss is at most -c A. Sources: PPO, arXiv 1707.06347; different
    bounds below and above, DAPO, arXiv 2503.14476; dual clip, arXiv 1912.09729.
    """
    ratio = bounded_exp(inputs.trainer_logprobs - inputs.old_logprobs)
    clipped = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    surrogate = torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages)
    is_clipped = clipped.detach() * inputs.advantages < ratio.detach() * inputs.advantages
    if settings.dual_clip:
        floor = settings.dual_clip * inputs.advantages
        is_floored = (inputs.advantages < 0) & (surrogate.detach() < floor)
        surrogate = torch.where(is_floored, floor, surrogate)
        is_clipped = is_clipped | is_floored
    return TokenLosses(losses=-surrogate, stats={"clip_fraction": is_clipped.to(ratio.dtype)})


def cispo(inputs: LossInputs, settings: AlgorithmSettings) -> TokenLosses:
    """-sg(min(rho, cispo_max)) A log pi: the weight is capped, and no token loses its gradient.

    sg stops the gradient. Source: CISPO in MiniMax-M1, arXiv 2506.13585, without a lower bound.
    """
    ratio = bounded_exp(inputs.trainer_logprobs.detach() - inputs.old_logprobs)
    losses = -ratio.clamp(max=settings.cispo_max) * inputs.advantages * inputs.trainer_logprobs
    return TokenLosses(losses=losses, stats={"clip_fraction": (ratio > settings.cispo_max).to(ratio.dtype)})


def sapo(inputs: LossInputs, settings: AlgorithmSettings) -> TokenLosses:
    """-(4 / tau) sigmoid(tau (rho - 1)) A, tau by the sign of A: a gate that closes softly.

    Its slope is 1 at rho = 1. Source: SAPO, arXiv 2511.20347.
    """
    ratio = bounded_exp(inputs.trainer_logprobs - inputs.old_logprobs)
    positive, negative = ratio.new_tensor(settings.sapo_tau_positive), ratio.new_tensor(settings.sapo_tau_negative)
    tau = torch.where(inputs.advantages > 0, positive, negative)
    gate = torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau
    return TokenLosses(losses=-gate * inputs.advantages)


def dppo(inputs: LossInputs, settings: AlgorithmSettings) -> TokenLosses:
    """-M rho A with M = 0 where the update leads further away from beyond dppo_max, else 1.

    It leads away where A (rho - 1) > 0. The divergence is that of "this token or any other": |pi -
    old| (tv), or old log(old / pi) + (1 - old) log((1 - old) / (1 - pi)) (kl). Unlike a clip of the
    ratio it leaves rare tokens room, and likely ones little. Source: DPPO, arXiv 2602.04879.
    """
    ratio = bounded_exp(inputs.trainer_logprobs - inputs.old_logprobs)
    divergence = _binary_divergence(inputs.old_logprobs, inputs.trainer_logprobs.detach(), settings)
    leads_away = inputs.advantages * (ratio.detach() - 1.0) > 0
    is_masked = leads_away & (divergence > settings.dppo_max)
    losses = torch.where(is_masked, 0.0, -ratio * inputs.advantages)
    return TokenLosses(losses=losses, stats={"clip_fraction": is_masked.to(ratio.dtype)})


def _binary_divergence(old_logprobs: Tensor, logprobs: Tensor, settings: AlgorithmSettings) -> Tensor:
    old, new = old_logprobs.exp(), logprobs.exp()
    if settings.dppo_divergence == "tv":
        return (new - old).abs()
    tiny = torch.finfo(old.dtype).tiny
    others = (1.0 - old).clamp(min=tiny).log() - (1.0 - new).clamp(min=tiny).log()
    return old * (old_logprobs - logprobs) + (1.0 - old).clamp(min=0.0) * others


LOSSES: dict[str, LossFunction] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "topr": topr,
    "dppo": dppo,
}
