"""What teachers say becomes a part of the advantages, or a divergence that is a loss itself.

In: logprobs of the same tokens by teacher and trainer. Out: what each token gains, or how far it is.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pipeline.algorithms.ratios import MAX_LOG_RATIO

# Of 1 less a sum of float32 probabilities, what is below is rounding.
_LEAST_REST = 1e-6

# Of an id, in nats: its share is nothing, and a logit of minus infinity stays finite.
_LEAST_LOGPROB = -100.0


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


def generalized_jsd(teacher: Tensor, trainer: Tensor, weights: Tensor, *, beta: float) -> tuple[Tensor, Tensor]:
    """JSD_beta of trainer and teacher over the teacher's k likeliest ids and one bucket for all others, [M].

    JSD_beta(P || Q) = beta KL(P || X) + (1 - beta) KL(Q || X) with X = beta P + (1 - beta) Q, P the teacher
    and Q the trainer, as in the paper. It is 0 at both ends; there the setting means what the paper
    divides out, beta = 0 the forward KL(P || Q), beta = 1 the reverse KL(Q || P), as in TRL.
    With k = V that is the divergence itself, with fewer ids a lower bound of it: merging ids can only bring
    distributions nearer (data-processing inequality). Where J teachers speak, sum_j w_j JSD_j / sum_j w_j.
    teacher: [M, J, k] logprobs, -inf where there is none. trainer: [M, J, k + 1], the others last; -inf as in
    teacher, or for ids that only the teacher has. weights: [M, J], 0 where nothing was said. Also returns
    the share of the teachers' probability that is on their ids, [M] without gradient, 0 where nobody has
    said anything; the divergence is 0 there. Source: GKD, arXiv 2306.13649, section 2.
    """
    is_there = torch.isfinite(trainer)  # [M, J, k + 1]
    on_ids = torch.where(is_there[..., :-1], teacher, -torch.inf).exp()
    rest = 1 - on_ids.sum(-1, keepdim=True)
    # A rest of nothing is 0 where it weighs, and least where the trainer's is held against it.
    probabilities = torch.cat([on_ids, torch.where(rest > _LEAST_REST, rest, 0.0)], dim=-1)
    theirs = torch.cat([teacher, rest.clamp(min=_LEAST_REST).log()], dim=-1)
    theirs = torch.where(is_there, theirs, 0.0)
    ours = torch.where(is_there, trainer, 0.0).clamp(min=_LEAST_LOGPROB)
    shares = torch.where(is_there, ours.exp(), 0.0)
    if beta == 0:
        terms = probabilities * (theirs - ours)
    elif beta == 1:
        terms = shares * (ours - theirs)
    else:
        mixed = torch.logaddexp(theirs + math.log(beta), ours + math.log1p(-beta))
        terms = beta * probabilities * (theirs - mixed) + (1 - beta) * shares * (ours - mixed)
    portions = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    return (portions * terms.sum(-1)).sum(-1), (portions * on_ids.sum(-1)).sum(-1)
