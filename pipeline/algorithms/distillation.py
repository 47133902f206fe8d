"""A teacher's logprobs of the sampled tokens become a part of the advantages.

In: logprobs of the same tokens by teacher and trainer, [B, T]. Out: what each token gains, [B, T].
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.algorithms.ratios import MAX_LOG_RATIO


def reverse_kl_advantages(teacher_logprobs: Tensor, trainer_logprobs: Tensor) -> Tensor:
    """D_t = log p_T(y_t) - log pi(y_t), between -20 and 20 nats; 0 where the teacher says nothing (NaN).

    As an advantage on tokens of the policy its expected gradient is that of -KL(pi || p_T), token by
    token; on older tokens the importance weight stands for the change. No gradient flows through it.
    teacher_logprobs: [B, T], -inf where the teacher excludes the token. trainer_logprobs: [B, T].
    Source: on-policy distillation with the reverse KL divergence, GKD, arXiv 2306.13649, and MiniLLM,
    arXiv 2306.08543, in the form of a reward for each token.
    """
    gains = (teacher_logprobs - trainer_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.where(torch.isnan(teacher_logprobs), 0.0, gains)
