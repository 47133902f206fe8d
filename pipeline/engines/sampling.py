"""Drawing one token a row, exactly, and reproducibly whatever else is in the batch.

In: logits and each row's sampling settings. Out: token ids, their logprobs under the distribution
they were drawn from, and which ids could be drawn. Randomness is one uniform number for each token
from a counter-based generator, so a row's draws depend on nothing but its own seed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

_WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowSampling:
    """Settings of every row, on the device of the logits.

    temperature: [n], 1 for greedy rows. is_greedy: [n]. top_p: [n]. top_k: [n], vocabulary size for off.
    is_truncated: whether any row has top_p < 1 or top_k on; has_greedy: whether any row is greedy.
    """

    temperature: torch.Tensor
    is_greedy: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    is_truncated: bool
    has_greedy: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draw:
    """token_ids: [n]. logprobs: [n] float32. kept: [n, V] bool, or None where nothing was cut away."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    kept: torch.Tensor | None


def uniforms(seed: int, ordinal: int, index: int, count: int) -> npt.NDArray[np.float64]:
    """The numbers in [0, 1) that draw completion `index` of group `ordinal`, one for each token, [count].

    Philox 4x64 (Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3"), keyed by
    (seed, ordinal) and started at a counter that no other completion reaches.
    """
    philox = np.random.Philox(key=[seed & _WORD, ordinal & _WORD], counter=[0, 0, 0, index & _WORD])
    return np.random.Generator(philox).random(count)


def draw(logits: torch.Tensor, sampling: RowSampling, uniform: torch.Tensor) -> Draw:
    """Draw from logits [n, V] with one uniform number a row, [n] float64, by inverting the CDF.

    top-k acts first, top-p on what it leaves; the logprobs are renormalised over what both leave. A
    greedy row takes the best token, with its logprob at temperature 1.
    """
    scaled = logits.float() / sampling.temperature[:, None]
    kept = _survivors(scaled, sampling) if sampling.is_truncated else None
    if kept is not None:
        scaled = scaled.masked_fill(~kept, float("-inf"))
    logprobs = torch.log_softmax(scaled, dim=-1)
    cumulative = logprobs.double().exp_().cumsum_(dim=-1)  # [n, V]
    # The first entry above the target has a probability of its own, so no token that was cut is drawn.
    target = uniform[:, None] * cumulative[:, -1:]
    token_ids = torch.searchsorted(cumulative, target, right=True).clamp_(max=logits.shape[-1] - 1)
    if sampling.has_greedy:
        token_ids = torch.where(sampling.is_greedy[:, None], logprobs.argmax(dim=-1, keepdim=True), token_ids)
    return Draw(token_ids=token_ids[:, 0], logprobs=logprobs.gather(1, token_ids)[:, 0], kept=kept)


def _survivors(scaled: torch.Tensor, sampling: RowSampling) -> torch.Tensor:
    """Which tokens top-k and top-p leave, [n, V]. The most likely one always survives."""
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    in_top_k = rank < sampling.top_k[:, None]
    probabilities = ordered.masked_fill(~in_top_k, float("-inf")).softmax(dim=-1)
    mass_before = probabilities.cumsum(dim=-1) - probabilities
    keep = in_top_k & ((mass_before < sampling.top_p[:, None]) | (rank == 0))
    return torch.zeros_like(keep).scatter_(1, order, keep)
