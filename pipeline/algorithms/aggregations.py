"""How the losses of all tokens become one number.

In: trained tokens of every completion of the whole batch, [N]. Out: the factor of each of a
completion's token losses, [N] float64; the loss is their weighted sum. Known before the first
forward pass, so the loss cannot depend on how the batch is split. Where there is nothing to train
on, factors are 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.algorithms.carriers import AggregationFunction
from pipeline.config import AlgorithmSettings


def token_mean(num_tokens: Tensor, settings: AlgorithmSettings) -> Tensor:
    """1 / sum_j T_j: every token of the batch weighs the same. Source: DAPO, arXiv 2503.14476."""
    total = num_tokens.sum().clamp(min=1).double()
    return torch.where(num_tokens > 0, 1.0 / total, 0.0)


def sequence_mean(num_tokens: Tensor, settings: AlgorithmSettings) -> Tensor:
    """1 / (S T_i) over S completions: every completion weighs the same, so that the tokens of a
    long one weigh less. Source: GRPO, arXiv 2402.03300."""
    num_sequences = (num_tokens > 0).sum().clamp(min=1).double()
    return torch.where(num_tokens > 0, 1.0 / (num_sequences * num_tokens.clamp(min=1)), 0.0)


def sequence_sum(num_tokens: Tensor, settings: AlgorithmSettings) -> Tensor:
    """1 / S over S completions: the mean over completions of the sum of their token losses, the
    plain policy gradient. Source: REINFORCE, Williams (1992); compare Dr. GRPO, arXiv 2503.20783."""
    num_sequences = (num_tokens > 0).sum().clamp(min=1).double()
    return torch.where(num_tokens > 0, 1.0 / num_sequences, 0.0)


AGGREGATIONS: dict[str, AggregationFunction] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
}
