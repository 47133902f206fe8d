"""Policy losses whose ratio is that of a whole completion.

In: trainer logprobs with gradient, old logprobs, advantages and the mask, [B, T]; each row is a
completion, whole, whatever the micro-batch. Out: a loss for every token.
"""

from __future__ import annotations

import torch

from pipeline.algorithms.carriers import LossInputs, TokenLosses
from pipeline.algorithms.ratios import bounded_exp, sequence_mean, sequence_sum
from pipeline.config import AlgorithmSettings


def gspo(inputs: LossInputs, settings: AlgorithmSettings) -> TokenLosses:
    """-min(s A, clip(s, 1 - gspo_clip_low, 1 + gspo_clip_high) A), s = (prod_t rho_t)^(1/T).

    As s_t = sg(s) pi / sg(pi), which has the value of s and a gradient for each token; with one
    advantage and the mean over a completion this is its gradient too. Source: GSPO, arXiv 2507.18071.
    """
    log_ratios = inputs.trainer_logprobs.detach() - inputs.old_logprobs
    log_sequence = sequence_mean(log_ratios, inputs.mask)  # [B, 1]
    ratio = bounded_exp(log_sequence + inputs.trainer_logprobs - inputs.trainer_logprobs.detach())
    clipped = ratio.clamp(1.0 - settings.gspo_clip_low, 1.0 + settings.gspo_clip_high)
    surrogate = torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages)
    is_clipped = clipped.detach() * inputs.advantages < ratio.detach() * inputs.advantages
    return TokenLosses(losses=-surrogate, stats={"clip_fraction": is_clipped.to(ratio.dtype)})


def gmpo(inputs: LossInputs, settings: AlgorithmSettings) -> TokenLosses:
    """-A exp(mean_t c_t), c_t = log rho_t, clipped to gmpo_clip where A would push it further.

    The geometric mean of the clipped ratios: min(log rho, gmpo_clip) for A > 0 and max(log rho,
    -gmpo_clip) for A < 0. Every token has its completion's loss, and the gradient of its own c_t: with the
    mean over a completion that is the paper's, and a token that a correction weighs is weighed alone.
    Source: GMPO, arXiv 2507.20673.
    """
    log_ratios = inputs.trainer_logprobs - inputs.old_logprobs
    bound = settings.gmpo_clip
    clipped = torch.where(inputs.advantages >= 0, log_ratios.clamp(max=bound), log_ratios.clamp(min=-bound))
    log_mean = sequence_mean(clipped.detach(), inputs.mask)  # [B, 1]
    mean = bounded_exp(log_mean + clipped - clipped.detach())
    is_clipped = clipped.detach() != log_ratios.detach()
    return TokenLosses(losses=-inputs.advantages * mean, stats={"clip_fraction": is_clipped.to(mean.dtype)})


def topr(inputs: LossInputs, settings: AlgorithmSettings) -> TokenLosses:
    """-sg(w) A log pi with w = 1 for A >= 0 and w = min(prod_t rho_t, 1) for A < 0.

    What was right is learnt however unlikely it has become; what was wrong fades with its own
    probability. Source: tapered off-policy REINFORCE, arXiv 2503.14286.
    """
    log_ratios = inputs.trainer_logprobs.detach() - inputs.old_logprobs
    ratio = sequence_sum(log_ratios, inputs.mask).clamp(max=0.0).exp()  # [B, 1]
    weights = torch.where(inputs.advantages < 0, ratio, 1.0)
    return TokenLosses(losses=-weights * inputs.advantages * inputs.trainer_logprobs)
