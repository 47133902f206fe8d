"""How the losses of all tokens become one number.

In: trained tokens of every completion of the whole batch. Out: the factor of each of a completion's
token losses, [N] float64; the loss is their weighted sum. Known before the first forward pass, so
the loss cannot depend on how the batch is split. Where there is nothing to train on, factors are 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.algorithms.carriers import AggregationFunction, BatchShape
from pipeline.config import AlgorithmSettings


def token_mean(shape: BatchShape, settings: AlgorithmSettings) -> Tensor:
    """1 / sum_j T_j: every token of the batch weighs the same. Source: DAPO, arXiv 2503.14476."""
    total = shape.num_tokens.sum().clamp(min=1).double()
    return torch.where(shape.num_tokens > 0, 1.0 / total, 0.0)


def sequence_mean(shape: BatchShape, settings: AlgorithmSettings) -> Tensor:
    """1 / (S T_i) over S completions: every completion weighs the same, so that the tokens of a
    long one weigh less. Source: GRPO, arXiv 2402.03300."""
    factors = 1.0 / (_num_sequences(shape) * shape.num_tokens.clamp(min=1))
    return torch.where(shape.num_tokens > 0, factors, 0.0)


def sequence_sum(shape: BatchShape, settings: AlgorithmSettings) -> Tensor:
    """1 / S over S completions: the mean over completions of the sum of their token losses, the
    plain policy gradient. Source: REINFORCE, Williams (1992)."""
    return torch.where(shape.num_tokens > 0, 1.0 / _num_sequences(shape), 0.0)


def constant(shape: BatchShape, settings: AlgorithmSettings) -> Tensor:
    """1 / (S L) with one L for all completions, their limit: `sequence_sum` on the scale of a mean,
    without a completion's length in it. Source: Dr. GRPO, arXiv 2503.20783."""
    length = settings.aggregation_length or max(1, shape.max_tokens)
    return sequence_sum(shape, settings) / length


def _num_sequences(shape: BatchShape) -> Tensor:
    return (shape.num_tokens > 0).sum().clamp(min=1).double()


AGGREGATIONS: dict[str, AggregationFunction] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
    "constant": constant,
}
