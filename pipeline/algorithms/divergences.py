"""Estimators of the KL divergence from one token that was drawn.

In: x = log(other / sampled) at tokens drawn from `sampled`. Out: an estimate of KL(sampled || other)
for each token. As a term of the loss they have gradients of their own, which differ from each other.
Source: J. Schulman, "Approximating KL divergence" (2020); gradients, arXiv 2510.01555.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pipeline.algorithms.ratios import MAX_LOG_RATIO


def k1(log_ratio: Tensor) -> Tensor:
    """-x: unbiased, of high variance, and may be negative.

    As a reward (times the score function) its gradient is that of the divergence; as a loss its
    gradient is 0 on average.
    """
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """x^2 / 2: biased, never negative. As a loss, on tokens of the policy itself, its gradient is that
    of the divergence."""
    return log_ratio.square() / 2


def k3(log_ratio: Tensor) -> Tensor:
    """exp(x) - x - 1: unbiased, never negative, and of lower variance than k1.

    As a loss its gradient is that of KL(other || sampled), which is near the other one while both
    policies are near. In GRPO, arXiv 2402.03300.
    """
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(bounded) - bounded


DIVERGENCES: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
