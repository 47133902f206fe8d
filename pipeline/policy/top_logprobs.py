"""Logprobs of the ids that a teacher finds likeliest: for the teacher, and for the policy that learns from it.

In: one state for each token, and how a state becomes logits. Out: besides what `chunked_logprobs` gives,
k numbers for each token. At most `chunk_tokens` rows of logits exist at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from pipeline.batching import KeptTokens, TeacherTop
from pipeline.policy.logprobs import Targets, in_chunks, limit_to_kept, token_logprobs


@torch.no_grad()
def chunked_top_logprobs(
    states: Tensor, targets: Targets, project: Callable[[Tensor], Tensor], *, chunk_tokens: int, top_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs [M] as of `chunked_logprobs`; and the likeliest ids with theirs, [M, k] each.

    k: `top_k`, or all ids where there are no more. An id that could not be drawn has -inf.
    """

    def ask(
        states: Tensor, token_ids: Tensor, temperatures: Tensor, kept: KeptTokens | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        raw = project(states)
        logprobs, _ = token_logprobs(raw, token_ids, temperatures, kept)
        logits = _scaled(raw, temperatures, kept)
        top, ids = logits.topk(min(top_k, logits.shape[1]), dim=1)
        is_kept = top > torch.finfo(top.dtype).min
        return logprobs, ids, torch.where(is_kept, top - logits.logsumexp(dim=1, keepdim=True), -torch.inf)

    logprobs, ids, logprobs_of_ids = in_chunks(ask, states, targets, chunk_tokens=chunk_tokens)
    return logprobs, ids, logprobs_of_ids


def chunked_logprobs_with_top(
    states: Tensor, targets: Targets, top: TeacherTop, project: Callable[[Tensor], Tensor], *, chunk_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs [M] and entropies [M] as of `chunked_logprobs`; and of the ids of `top`, [M, J, k + 1] with gradient:
    of each, -inf where there is none, and last of all others together."""
    wanted = (top.token_ids, torch.isfinite(top.logprobs))
    logprobs, entropies, of_top = in_chunks(
        partial(_chunk, project), states, targets, *wanted, chunk_tokens=chunk_tokens
    )
    return logprobs, entropies, of_top


def _chunk(
    project: Callable[[Tensor], Tensor],
    states: Tensor,
    token_ids: Tensor,
    temperatures: Tensor,
    kept: KeptTokens | None,
    top_ids: Tensor,
    is_there: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    raw = project(states)  # [m, V]
    logprobs, entropies = token_logprobs(raw, token_ids, temperatures, kept)
    return logprobs, entropies, _logprobs_of(_scaled(raw, temperatures, kept), top_ids, is_there)


def _logprobs_of(logits: Tensor, token_ids: Tensor, is_there: Tensor) -> Tensor:
    """log p of the ids [m, J, k] and of all others together, [m, J, k + 1].

    That of the others is their own logsumexp: 1 less the sum of the k would be rounding where they are few.
    """
    num_ids = logits.shape[1]
    is_there = is_there & (token_ids < num_ids)  # a teacher may have more
    found = []
    for ids in torch.where(is_there, token_ids, num_ids).unbind(dim=1):  # [m, k]
        is_named = torch.zeros(len(ids), num_ids + 1, dtype=torch.bool, device=ids.device).scatter_(1, ids, True)
        others = logits.masked_fill(is_named[:, :-1], torch.finfo(logits.dtype).min).logsumexp(dim=1, keepdim=True)
        found.append(torch.cat([logits.gather(1, ids.clamp(max=num_ids - 1)), others], dim=1))
    logprobs = torch.stack(found, dim=1) - logits.logsumexp(dim=1)[:, None, None]
    return logprobs.masked_fill(~torch.nn.functional.pad(is_there, (0, 1), value=True), -torch.inf)


def _scaled(logits: Tensor, temperatures: Tensor, kept: KeptTokens | None) -> Tensor:
    """Logits [m, V] at the temperature, over the ids that could be drawn; float32 or wider."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    logits = logits / temperatures.to(dtype)[:, None]
    return logits if kept is None else limit_to_kept(logits, kept)
