"""Policy losses of single tokens.

In: trainer logprobs with gradient, old logprobs, advantages, [B, T]. Out: a loss for every token,
not masked and not averaged; that is the aggregation's part.
"""

from __future__ import annotations

import torch

from pipeline.algorithms.carriers import LossFunction, LossInputs, TokenLosses
from pipeline.algorithms.ratios import MAX_LOG_RATIO
from pipeline.config import AlgorithmSettings


def ppo_clip(inputs: LossInputs, settings: AlgorithmSettings) -> TokenLosses:
    """-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) with rho = exp(log pi - log pi_old).

    Sources: PPO, arXiv 1707.06347; different bounds below and above, DAPO, arXiv 2503.14476.
    """
    log_ratio = inputs.trainer_logprobs - inputs.old_logprobs
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    surrogate = torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages)
    is_clipped = clipped.detach() * inputs.advantages < ratio.detach() * inputs.advantages
    return TokenLosses(losses=-surrogate, stats={"clip_fraction": is_clipped.to(ratio.dtype)})


LOSSES: dict[str, LossFunction] = {"ppo_clip": ppo_clip}
