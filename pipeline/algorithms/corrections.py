"""Generator and trainer never agree exactly: other kernels, and older weights. This reconciles them.

In: logprobs of the same tokens by the trainer (now) and by the generator (when sampled), [B, T].
Out: the logprobs that the loss forms its ratio against, and a weight for every token. Acts per
token, each against the weights that really sampled it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.algorithms.carriers import Correction, CorrectionFunction
from pipeline.algorithms.ratios import usable_ratios
from pipeline.config import AlgorithmSettings


def none(trainer_logprobs: Tensor, generator_logprobs: Tensor, settings: AlgorithmSettings) -> Correction:
    """old = log pi_generator, weight = 1: the loss's own ratio is pi_trainer / pi_generator.

    The clip then bounds how far the trainer moves from the generator's policy. Source: PPO, arXiv
    1707.06347, with the generator as the old policy.
    """
    is_usable = usable_ratios(trainer_logprobs, generator_logprobs)
    return Correction(
        old_logprobs=torch.where(is_usable, generator_logprobs, trainer_logprobs),
        weights=torch.ones_like(trainer_logprobs),
        is_usable=is_usable,
    )


def tis(trainer_logprobs: Tensor, generator_logprobs: Tensor, settings: AlgorithmSettings) -> Correction:
    """old = log pi_trainer (detached), weight = min(pi_trainer / pi_generator, truncation).

    Truncated importance sampling of each token: unbiased where no weight reaches the cap, and of
    bounded variance where one does. Sources: Ionides, "Truncated importance sampling" (2008);
    IMPALA, arXiv 1802.01561; for the mismatch of engines, Yao et al., "Your efficient RL framework
    secretly brings you off-policy RL training" (2025).
    """
    is_usable = usable_ratios(trainer_logprobs, generator_logprobs)
    log_ratio = torch.where(is_usable, trainer_logprobs - generator_logprobs, 0.0)
    ratio = log_ratio.exp()
    return Correction(
        old_logprobs=trainer_logprobs,
        weights=ratio.clamp(max=settings.truncation),
        is_usable=is_usable,
        stats={"truncated_fraction": (ratio > settings.truncation).to(ratio.dtype)},
    )


CORRECTIONS: dict[str, CorrectionFunction] = {"none": none, "tis": tis}
