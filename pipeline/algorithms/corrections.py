"""Generator and trainer never agree exactly: other kernels, and older weights. This reconciles them.

In: log-ratios of the same tokens between trainer and generator, [B, T], each against the weights
that really sampled it. Out: a weight for every token, 0 where the token is masked. What is masked
stays in the denominator, which is fixed before the first forward pass.
"""

from __future__ import annotations

import torch

from pipeline.algorithms.carriers import Correction, CorrectionFunction, CorrectionInputs
from pipeline.algorithms.ratios import bounded_exp
from pipeline.algorithms.sequence_corrections import (
    geometric_mis,
    geometric_tis,
    m2po,
    opsm,
    sequence_mis,
    sequence_tis,
)
from pipeline.algorithms.weights import kept, truncated
from pipeline.config import AlgorithmSettings


def none(inputs: CorrectionInputs, settings: AlgorithmSettings) -> Correction:
    """w = 1. With the generator as the proximal policy the loss's own ratio is the correction."""
    return Correction(weights=torch.ones_like(inputs.log_ratios))


def importance(inputs: CorrectionInputs, settings: AlgorithmSettings) -> Correction:
    """w = rho: importance sampling without a bound. Unbiased, of a variance that grows with age."""
    return Correction(weights=bounded_exp(inputs.log_ratios))


def tis(inputs: CorrectionInputs, settings: AlgorithmSettings) -> Correction:
    """w = min(rho, truncation).

    Truncated importance sampling of each token: unbiased where no weight reaches the cap, and of
    bounded variance where one does. Sources: Ionides, "Truncated importance sampling" (2008);
    IMPALA, arXiv 1802.01561; for the mismatch of engines, Yao et al., "Your efficient RL framework
    secretly brings you off-policy RL training" (2025).
    """
    return truncated(inputs, inputs.log_ratios, settings)


def mis(inputs: CorrectionInputs, settings: AlgorithmSettings) -> Correction:
    """w = rho where rho <= truncation, else 0. Source: Liu et al., "When speed kills stability:
    demystifying RL collapse from the training-inference mismatch" (2025)."""
    ratios = bounded_exp(inputs.log_ratios)
    return kept(inputs, ratios, ratios <= settings.truncation)


def icepop(inputs: CorrectionInputs, settings: AlgorithmSettings) -> Correction:
    """w = rho where band_low <= rho <= band_high, else 0: a token that the two disagree on says
    nothing, in whichever direction. Source: IcePop in Ring-1T, arXiv 2510.18855."""
    ratios = bounded_exp(inputs.log_ratios)
    return kept(inputs, ratios, (ratios >= settings.band_low) & (ratios <= settings.band_high))


CORRECTIONS: dict[str, CorrectionFunction] = {
    "none": none,
    "importance": importance,
    "tis": tis,
    "mis": mis,
    "icepop": icepop,
    "sequence_tis": sequence_tis,
    "sequence_mis": sequence_mis,
    "geometric_tis": geometric_tis,
    "geometric_mis": geometric_mis,
    "m2po": m2po,
    "opsm": opsm,
}
