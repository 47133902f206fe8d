"""Micro-batches dealt out to ranks: as many to each, and about as many tokens.

In: the samples of a step. Out: for each rank lists of their indices; an empty one where a rank has
nothing to do while others have. All ranks compute the same, so nobody has to say it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.packing import Layout, describe_layout, split
from pipeline.samples import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """micro_batches: of one rank. of_all_ranks: that have something to compute. balance: mean over largest of the
    ranks' tokens, 1 where all have as many."""

    micro_batches: list[list[int]]
    of_all_ranks: list[list[int]]
    balance: float


def deal(samples: Sequence[Sample], budget: int, layout: Layout, *, rank: int, size: int) -> Deal:
    """What `rank` of `size` computes. budget: tokens of a micro-batch; where ranks would idle they are made smaller.

    Ranks wait for each other after every micro-batch where weights are sharded, so each round has
    micro-batches of about one size, and whoever has done least so far gets the largest of them.
    """
    batches = _enough(samples, budget, layout, size)
    if size == 1:
        return Deal(micro_batches=batches, of_all_ranks=batches, balance=1.0)
    costs = [round(describe_layout(samples, [rows], layout)["forward_tokens"]) for rows in batches]
    order = sorted(range(len(batches)), key=lambda index: (-costs[index], index))
    shares: list[list[list[int]]] = [[] for _ in range(size)]
    loads = [0] * size
    for start in range(0, len(order), size):
        least_first = sorted(range(size), key=lambda index: (loads[index], index))
        chosen = [*order[start : start + size]]
        for place, target in enumerate(least_first):
            shares[target].append(batches[chosen[place]] if place < len(chosen) else [])
            loads[target] += costs[chosen[place]] if place < len(chosen) else 0
    largest = max(loads, default=0)
    balance = sum(loads) / (size * largest) if largest else 1.0
    return Deal(micro_batches=shares[rank], of_all_ranks=batches, balance=balance)


def _enough(samples: Sequence[Sample], budget: int, layout: Layout, size: int) -> list[list[int]]:
    """Micro-batches in as few rounds as the budget allows, under the smallest budget that needs no more rounds."""
    batches = [*split(samples, budget, layout)]
    limit = -(-len(batches) // size) * size  # so many places there are in as many rounds
    low, high = 1, budget
    while size > 1 and low < high and len(batches) < limit:
        middle = (low + high) // 2
        tried = [*split(samples, middle, layout)]
        if len(tried) > limit:
            low = middle + 1
            continue
        batches, high = tried, middle
    return batches


def shortest(samples: Sequence[Sample]) -> int:
    """The cheapest sample to compute, of those that can be trained on."""
    return min(
        (index for index, sample in enumerate(samples) if sample.num_tokens),
        key=lambda index: (samples[index].length, index),
    )
