"""Log-ratios that are safe to exponentiate, and the divergence estimator made of them.

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


def k3(log_ratio: Tensor) -> Tensor:
    """exp(x) - x - 1 with x = log(other / sampled), at tokens drawn from `sampled`.

    Unbiased for KL(sampled || other), never negative, and of lower variance than -x.
    Source: J. Schulman, "Approximating KL divergence" (2020); as a loss term in GRPO, arXiv 2402.03300.
    """
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(bounded) - bounded
