"""Corrections that look at whole completions, or at the whole batch, before they weigh a token.

In: log-ratios of one micro-batch, [B, T], each row a completion. Out: a weight for every token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.algorithms.carriers import Correction, CorrectionInputs
from pipeline.algorithms.ratios import bounded_exp, sequence_mean, sequence_sum
from pipeline.algorithms.weights import kept, truncated
from pipeline.config import AlgorithmSettings


def sequence_tis(inputs: CorrectionInputs, settings: AlgorithmSettings) -> Correction:
    """w = min(prod_t rho_t, truncation) for all tokens of a completion.

    The exact weight of a completion, cut off. Source: Liu et al., "When speed kills stability:
    demystifying RL collapse from the training-inference mismatch" (2025).
    """
    return truncated(inputs, sequence_sum(inputs.log_ratios, inputs.mask), settings)


def sequence_mis(inputs: CorrectionInputs, settings: AlgorithmSettings) -> Correction:
    """w = prod_t rho_t where that is at most `truncation`, else 0. Source: as `sequence_tis`."""
    ratios = bounded_exp(sequence_sum(inputs.log_ratios, inputs.mask))
    return kept(inputs, ratios, ratios <= settings.truncation)


def geometric_tis(inputs: CorrectionInputs, settings: AlgorithmSettings) -> Correction:
    """w = min((prod_t rho_t)^(1/T), truncation): does not drift away with length, as a product does.

    Biased. The ratio is that of GSPO, arXiv 2507.18071, as a weight.
    """
    return truncated(inputs, sequence_mean(inputs.log_ratios, inputs.mask), settings)


def geometric_mis(inputs: CorrectionInputs, settings: AlgorithmSettings) -> Correction:
    """w = (prod_t rho_t)^(1/T) where that is within [1 / geometric_band, geometric_band], else 0.

    Source: the geometric form of Liu et al. (2025), see `sequence_tis`.
    """
    ratios = bounded_exp(sequence_mean(inputs.log_ratios, inputs.mask))
    band = settings.geometric_band
    return kept(inputs, ratios, (ratios >= 1.0 / band) & (ratios <= band))


def opsm(inputs: CorrectionInputs, settings: AlgorithmSettings) -> Correction:
    """w = 0 for a completion of negative advantage with mean_t(-log rho_t) > opsm_max, else 1.

    Mistakes that the policy no longer makes teach it nothing and disturb it most. Off-policy sequence
    masking of DeepSeek-V3.2, arXiv 2512.02556.
    """
    divergence = -sequence_mean(inputs.log_ratios, inputs.mask)
    is_negative = sequence_sum(inputs.advantages, inputs.mask) < 0
    return kept(inputs, torch.ones_like(divergence), ~(is_negative & (divergence > settings.opsm_max)))


def m2po(inputs: CorrectionInputs, settings: AlgorithmSettings) -> Correction:
    """w = 0 for a token that is pushed further away (A log rho > 0) from beyond the batch's limit, else 1.

    The limit is `m2po_limit`'s. Source: M2PO, arXiv 2510.01161.
    """
    assert inputs.limit is not None, "the limit is found over the whole batch, before it is split"
    is_beyond = (inputs.advantages * inputs.log_ratios > 0) & (inputs.log_ratios.abs() > inputs.limit)
    weights = torch.ones_like(inputs.log_ratios)
    return kept(inputs, weights, ~is_beyond)


def m2po_limit(log_ratios: Tensor, advantages: Tensor, settings: AlgorithmSettings) -> Tensor:
    """The largest |log rho| of a token that is pushed further away and may stay, a scalar.

    log_ratios, advantages: [K], all usable tokens of the batch. Of the tokens with A log rho > 0 those
    with the largest |log rho| go, until the mean of (log rho)^2 over all that stay is at most
    m2po_max, or none of them is left. Infinite where none needs to go. It lies halfway between the
    last that goes and the first that stays, so that rounding in a second forward pass changes nothing.
    """
    squares = log_ratios.square().double()
    candidates = log_ratios.abs()[advantages * log_ratios > 0].double().sort(descending=True).values
    num_gone = torch.arange(len(candidates) + 1)
    gone = torch.cat([squares.new_zeros(1), candidates.square().cumsum(0)])
    means = (squares.sum() - gone) / (len(squares) - num_gone).clamp(min=1)
    enough = (means <= settings.m2po_max).nonzero()
    count = int(enough[0]) if len(enough) else len(candidates)
    if count == 0:
        return squares.new_tensor(torch.inf)
    first_left = candidates[count] if count < len(candidates) else squares.new_zeros(())
    return (candidates[count - 1] + first_left) / 2
