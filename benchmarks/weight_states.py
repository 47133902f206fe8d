"""Consecutive versions of a model in bfloat16: made up at a given density, and by real steps of AdamW.

In: a size. Out: bit patterns, and the fewest bytes that could tell one from the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

State = NDArray[np.uint16]

# How far the bit patterns of values that change move, and how often, as real steps at a learning rate of 1e-6
# move them: nearly all to a neighbour, values near 0 farther.
_MOVES = np.array([1, 2, 3, 4, 6, 12, 40, 200])
_SHARES = np.array([0.900, 0.044, 0.018, 0.010, 0.010, 0.012, 0.005, 0.001])


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """rounds: of everything. num_bytes: of the made-up model. num_layers, width: of the trained one, if any."""

    rounds: int
    num_bytes: int
    num_layers: int
    width: int


def random_weights(num_bytes: int) -> State:
    """Normal, with the spread of a usual initialisation."""
    values = np.random.default_rng(0).standard_normal(num_bytes // 2, dtype=np.float32) * np.float32(0.02)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def moved(old: State, density: float) -> State:
    """`old` with this share of its values moved."""
    random = np.random.default_rng(1)
    where = np.flatnonzero(random.random(len(old), dtype=np.float32) < density)
    distance = random.choice(_MOVES, len(where), p=_SHARES) * random.choice([-1, 1], len(where))
    new = old.copy()
    new[where] += distance.astype(np.uint16)
    return new


def entropy_bytes(old: State, new: State) -> float:
    """The fewest bytes on average, for who knows `old`, the density and how often each difference occurs.

    Positions: n * H(p) bits, each value having changed or not for itself. Differences: their
    empirical entropy.
    """
    differences = (new - old)[new != old]
    num_values, num_changed = len(old), len(differences)
    positions = num_values * _entropy_bits(np.array([num_changed, num_values - num_changed]))
    return (positions + num_changed * _entropy_bits(np.bincount(differences))) / 8


def _entropy_bits(counts: NDArray[np.integer]) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def trained(
    num_layers: int, width: int, learning_rate: float, *, num_warm: int = 4, num_pairs: int
) -> Iterator[tuple[State, State]]:
    """Pairs of consecutive versions: what a Llama with float32 master weights publishes in bfloat16.

    Random initial weights, random tokens, AdamW. The first steps, which move most, are left out.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(  # type: ignore[no-untyped-call]
        LlamaConfig(
            vocab_size=4096,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=num_layers,
            num_attention_heads=8,
            num_key_value_heads=8,
            tie_word_embeddings=True,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    old: State | None = None
    for number in range(num_warm + num_pairs):
        tokens = torch.randint(4096, (4, 64))
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        parts = [item.detach().to(torch.bfloat16).flatten().view(torch.uint16).numpy() for item in model.parameters()]
        new = np.concatenate(parts)
        if old is not None and number >= num_warm:
            yield old, new
        old = new
