"""What the loss forms its ratio against: the policy near which an update stays.

In: logprobs of the same tokens by the trainer before the update and by the generator when it drew
them, and the tokens' ages, [B, T]. Out: logprobs, [B, T], detached. What is left between it and the
generator is the correction's part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.algorithms.carriers import ProximalFunction


def generator(trainer_logprobs: Tensor, generator_logprobs: Tensor, ages: Tensor) -> Tensor:
    """log mu: the loss's own ratio is pi / mu, and its clip bounds how far the trainer moves from the
    generator's policy. Source: PPO, arXiv 1707.06347, with the generator as the old policy."""
    return generator_logprobs


def recomputed(trainer_logprobs: Tensor, generator_logprobs: Tensor, ages: Tensor) -> Tensor:
    """log pi before the update. With one update for each batch the loss's ratio is 1 and its clip
    never acts. Source: decoupled PPO, arXiv 2110.00641; AReaL, arXiv 2505.24298."""
    return trainer_logprobs


def interpolated(trainer_logprobs: Tensor, generator_logprobs: Tensor, ages: Tensor) -> Tensor:
    """log mu + (1 - 1/d) (log pi - log mu) for a token of age d, log pi for age 0.

    Stands for the policy one version ago without having it, for each token by its own age. At age 1
    it is the generator's. Source: A-3PO, arXiv 2512.06547.
    """
    share = 1.0 - 1.0 / ages.clamp(min=1).to(trainer_logprobs.dtype)
    between = generator_logprobs + share * (trainer_logprobs - generator_logprobs)
    return torch.where(ages > 0, between, trainer_logprobs)


PROXIMALS: dict[str, ProximalFunction] = {
    "generator": generator,
    "recomputed": recomputed,
    "interpolated": interpolated,
}
