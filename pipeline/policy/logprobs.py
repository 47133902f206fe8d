"""Logprobs of chosen tokens without ever holding the logits of all of them.

In: one state for each token, and how a state becomes logits. Out: logprob and entropy of each token.
At most `chunk_tokens` rows of logits exist at once; the backward pass makes them again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pipeline.batching import KeptTokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Targets:
    """Tokens whose logprobs are asked for. token_ids: [M]. temperatures: [M].

    kept: ids that could be drawn; the distribution is renormalised over them. None: all ids.
    """

    token_ids: Tensor
    temperatures: Tensor
    kept: KeptTokens | None = None


def chunked_logprobs(
    states: Tensor, targets: Targets, project: Callable[[Tensor], Tensor], *, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Logprobs [M] (with gradient) and entropies [M] (without) at the sampling temperature.

    log p(id) = z_id - logsumexp over kept z, z = project(state) / temperature; float32 or wider.
    states: [M, H]. project: [m, H] -> logits [m, V].
    """
    parts = []
    for start in range(0, len(states), chunk_tokens):
        rows = slice(start, min(start + chunk_tokens, len(states)))
        arguments = (states[rows], targets.token_ids[rows], targets.temperatures[rows], _kept_of(targets.kept, rows))
        if torch.is_grad_enabled():
            parts.append(checkpoint(_chunk, project, *arguments, use_reentrant=False))
        else:
            parts.append(_chunk(project, *arguments))
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropies for _, entropies in parts])


def _chunk(
    project: Callable[[Tensor], Tensor],
    states: Tensor,
    token_ids: Tensor,
    temperatures: Tensor,
    kept: KeptTokens | None,
) -> tuple[Tensor, Tensor]:
    logits = project(states)  # [m, V]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits / temperatures.to(logits.dtype)[:, None]
    chosen = logits.gather(1, token_ids[:, None]).squeeze(1)
    if kept is not None:
        logits = _limit(logits, kept)
    normalisers = logits.logsumexp(dim=1)
    return chosen - normalisers, _entropies(logits.detach(), normalisers.detach())


def _entropies(logits: Tensor, normalisers: Tensor) -> Tensor:
    """logsumexp(z) - sum(p z), [m], with one temporary of the size of the logits."""
    probabilities = (logits - normalisers[:, None]).exp_()
    return normalisers - probabilities.mul_(logits).sum(dim=1)


def _limit(logits: Tensor, kept: KeptTokens) -> Tensor:
    """Logits [m, V] with the lowest finite number where an id could not be drawn.

    Its probability is 0 as with -inf, but 0 times it is 0 and not NaN.
    """
    is_kept = torch.zeros_like(logits, dtype=torch.bool)
    is_kept[kept.rows, kept.ids] = True
    return logits.masked_fill(kept.is_limited[:, None] & ~is_kept, torch.finfo(logits.dtype).min)


def _kept_of(kept: KeptTokens | None, rows: slice) -> KeptTokens | None:
    """The part of `kept` that belongs to a chunk; `kept.rows` ascends."""
    if kept is None:
        return None
    bounds = torch.searchsorted(kept.rows, torch.tensor([rows.start, rows.stop], device=kept.rows.device))
    part = slice(int(bounds[0]), int(bounds[1]))
    return KeptTokens(ids=kept.ids[part], rows=kept.rows[part] - rows.start, is_limited=kept.is_limited[rows])
