"""What a correction makes of ratios: weights that are cut off, or that keep some tokens and mask the others.

In: ratios of tokens, [B, T], or of completions, [B, 1]. Out: a weight for every token, and which were touched.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.algorithms.carriers import Correction, CorrectionInputs
from pipeline.algorithms.ratios import bounded_exp
from pipeline.config import AlgorithmSettings


def truncated(inputs: CorrectionInputs, log_ratios: Tensor, settings: AlgorithmSettings) -> Correction:
    """w = min(exp(log_ratios), truncation). log_ratios: [B, T] or [B, 1]."""
    ratios = bounded_exp(log_ratios)
    is_truncated = (ratios > settings.truncation).to(ratios.dtype)
    return Correction(
        weights=ratios.clamp(max=settings.truncation).expand_as(inputs.log_ratios),
        stats={"truncated_fraction": is_truncated.expand_as(inputs.log_ratios)},
    )


def kept(inputs: CorrectionInputs, weights: Tensor, is_kept: Tensor) -> Correction:
    """w = weights where they are kept, else 0. weights, is_kept: [B, T] or [B, 1]."""
    return Correction(
        weights=torch.where(is_kept, weights, 0.0).expand_as(inputs.log_ratios),
        stats={"masked_fraction": (~is_kept).to(weights.dtype).expand_as(inputs.log_ratios)},
    )
