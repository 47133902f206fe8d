"""Logprobs of chosen tokens without ever holding the logits of all of them.

In: one state for each token, and how a state becomes logits. Out: logprob and entropy of each token.
At most `chunk_tokens` rows of logits exist at once. Where the output layer is trained, the backward pass
makes them again, but for the last ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

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
    states: Tensor,
    targets: Targets,
    project: Callable[[Tensor], Tensor],
    *,
    chunk_tokens: int,
    is_trained: bool = True,
) -> tuple[Tensor, Tensor]:
    """Logprobs [M] (with gradient) and entropies [M] (without) at the sampling temperature.

    log p(id) = z_id - logsumexp over kept z, z = project(state) / temperature; float32 or wider.
    states: [M, H]. project: [m, H] -> logits [m, V]. is_trained: `project` has weights that want a gradient.
    """
    ask = _chunk if is_trained or not torch.is_grad_enabled() else _frozen_chunk
    logprobs, entropies = in_chunks(
        partial(ask, project), states, targets, chunk_tokens=chunk_tokens, is_made_again=is_trained
    )
    return logprobs, entropies


def in_chunks(
    ask: Callable[..., tuple[Tensor, ...]],
    states: Tensor,
    targets: Targets,
    *more: Tensor,
    chunk_tokens: int,
    is_made_again: bool = True,
) -> tuple[Tensor, ...]:
    """What `ask` gives for all tokens, asked for at most `chunk_tokens` of them at once.

    ask: states, token_ids, temperatures, kept and `more` of some tokens -> tensors with a row for each.
    is_made_again: the backward pass asks anew for what it needs, instead of keeping it.
    """
    parts = []
    for start in range(0, len(states), chunk_tokens):
        rows = slice(start, min(start + chunk_tokens, len(states)))
        of_targets = (targets.token_ids[rows], targets.temperatures[rows], _kept_of(targets.kept, rows))
        arguments = (states[rows], *of_targets, *(each[rows] for each in more))
        # The backward pass begins with the last chunk: as long as it is kept, no other exists.
        if torch.is_grad_enabled() and is_made_again and rows.stop < len(states):
            parts.append(checkpoint(ask, *arguments, use_reentrant=False))
        else:
            parts.append(ask(*arguments))
    return tuple(torch.cat(columns) for columns in zip(*parts, strict=True))


def _chunk(
    project: Callable[[Tensor], Tensor],
    states: Tensor,
    token_ids: Tensor,
    temperatures: Tensor,
    kept: KeptTokens | None,
) -> tuple[Tensor, Tensor]:
    return token_logprobs(project(states), token_ids, temperatures, kept)


def token_logprobs(
    logits: Tensor, token_ids: Tensor, temperatures: Tensor, kept: KeptTokens | None
) -> tuple[Tensor, Tensor]:
    """Of logits [m, V] as the output layer gives them. See `chunked_logprobs`."""
    found: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        logits, token_ids, temperatures, kept
    )
    return found


def _frozen_chunk(
    project: Callable[[Tensor], Tensor], states: Tensor, *arguments: Tensor | KeptTokens | None
) -> tuple[Tensor, Tensor]:
    """`_chunk` for an output layer that is not trained: each logprob depends on its own state alone, so their
    derivatives, [m, H], are made at once, and no logits are needed for the gradient."""
    with torch.enable_grad():
        alone = states.detach().requires_grad_()
        logprobs, entropies = _chunk(project, alone, *arguments)  # type: ignore[arg-type]
        (derivatives,) = torch.autograd.grad(logprobs.sum(), alone)
    differentiable: Tensor = _WithDerivatives.apply(states, logprobs.detach(), derivatives)  # type: ignore[no-untyped-call]
    return differentiable, entropies.detach()


class _WithDerivatives(torch.autograd.Function):
    """Values [m] of states [m, H] whose derivatives [m, H] are known."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, values: Tensor, derivatives: Tensor) -> Tensor:
        ctx.save_for_backward(derivatives)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor, None, None]:
        (derivatives,) = ctx.saved_tensors
        return (slopes[:, None] * derivatives).to(derivatives.dtype), None, None


class _TokenLogprobs(torch.autograd.Function):
    """Logprobs and entropies, each [m], of tokens under logits [m, V].

    d log p(id) / d z_j = [j = id] - p_j. Two tensors of the size of the logits are made, and the one that
    is kept for the gradient becomes the gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, token_ids: Tensor, temperatures: Tensor, kept: KeptTokens | None
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        temperatures = temperatures.to(dtype)[:, None]
        shifted = logits / temperatures  # [m, V]
        chosen = shifted.gather(1, token_ids[:, None])
        if kept is not None:
            shifted = limit_to_kept(shifted, kept)
        largest = shifted.amax(dim=1, keepdim=True)
        masses = shifted.sub_(largest).exp()  # p times total
        total = masses.sum(dim=1, keepdim=True)
        logprobs = (chosen - largest - total.log()).squeeze(1)
        entropies = (total.log() - shifted.mul_(masses).sum(dim=1, keepdim=True) / total).squeeze(1)
        ctx.save_for_backward(masses, total, token_ids, temperatures)
        ctx.dtype = logits.dtype
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None, None]:
        """slopes: of the loss by the logprobs, [m], and by the entropies, which is not looked at."""
        masses, total, token_ids, temperatures = ctx.saved_tensors
        factors = slopes[0][:, None] / temperatures
        gradient = masses.mul_(-factors / total).scatter_add_(1, token_ids[:, None], factors)
        return gradient.to(ctx.dtype), None, None, None


def limit_to_kept(logits: Tensor, kept: KeptTokens) -> Tensor:
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
