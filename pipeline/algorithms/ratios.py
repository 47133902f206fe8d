"""Log-ratios that are safe to exponentiate, and sums of them over completions.

In: logprobs, which may hold anything. Out: finite numbers, and where they can be trusted.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


def usable_ratios(trainer_logprobs: Tensor, generator_logprobs: Tensor) -> Tensor:
    """Where trainer and generator logprobs [B, T] form a ratio that can be trusted, [B, T] bool.

    A difference of more than 20 nats is no off-policy data but a fault (a token that the other side
    all but excludes, a different tokeniser, a broken kernel); it is treated like NaN.
    """
    log_ratio = trainer_logprobs.detach() - generator_logprobs
    return torch.isfinite(log_ratio) & (log_ratio.abs() <= MAX_LOG_RATIO)


def bounded_exp(log_ratios: Tensor) -> Tensor:
    """exp(x) with x clamped to 20 nats on both sides."""
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of each row's values [B, T] within the mask, [B, 1]. A row is a completion."""
    return torch.where(mask, values, 0.0).sum(dim=1, keepdim=True)


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of each row's values [B, T] within the mask, [B, 1]; 0 where the mask is empty."""
    return sequence_sum(values, mask) / mask.sum(dim=1, keepdim=True).clamp(min=1)
