"""Which layout of micro-batches a model can be trusted with, found out when it is loaded.

In: a model and the layout that is wanted. Out: the best one that gives, on a few tokens, the states
that each sequence has alone. Whatever looks beyond its own segment in a way of its own (linear
attention, a state space, positions that count on) shows in that, and goes through padded rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.batching import Layout, Routing, Segments
from pipeline.models.routing import RoutingRecorder, RoutingReplay, has_known_routers
from pipeline.policy.output_head import OutputHead
from pipeline.policy.packed_attention import (
    Kernel,
    packed_attention,
    packed_mask,
    supports_packed_attention,
    use_packed_attention,
)

# A prompt with two completions, and a sequence of its own, in tokens.
_PROMPT, _COMPLETIONS, _OTHER = 3, (4, 2), 5
_SEQUENCES = (_PROMPT + _COMPLETIONS[0], _PROMPT + _COMPLETIONS[1], _OTHER)

_TOLERANCE = 1e-4
_NARROW_TOLERANCE = 0.05
_KERNEL_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """layout: that the model can be trusted with. reason: why it is not the one that was wanted, else empty."""

    layout: Layout
    reason: str = ""


def prove_layout(model: PreTrainedModel, head: OutputHead, wanted: Layout) -> Proven:
    """The best layout up to `wanted`; the model's attention is switched to what it needs."""
    if wanted is Layout.PADDED:
        return Proven(layout=wanted)
    if not supports_packed_attention(model):
        return Proven(layout=Layout.PADDED, reason="its attention is not transformers' sdpa")
    use_packed_attention(model)
    reason = ""
    for layout in (Layout.SHARED, Layout.PACKED) if wanted is Layout.SHARED else (Layout.PACKED,):
        failure = _failure(model, head, layout)
        if not failure:
            return Proven(layout=layout, reason=reason)
        reason = reason or failure
    use_packed_attention(model, is_used=False)
    return Proven(layout=Layout.PADDED, reason=reason)


def choose_kernel(model: PreTrainedModel, device: torch.device) -> Kernel:
    """The kernel of variable lengths where this device has one that agrees with blocks, gradients included."""
    if device.type != "cuda":
        return Kernel.BLOCKS
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Kernel.VARLEN if varlen_agrees(heads, kv_heads, head_dim, device) else Kernel.BLOCKS


def varlen_agrees(heads: int, kv_heads: int, head_dim: int, device: torch.device) -> bool:
    """Whether attention over a shared prompt has the same numbers and gradients by both kernels, in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    segments = _segments(Layout.SHARED)
    num_tokens = int(segments.lengths.sum())
    query, key, value = (
        torch.randn((1, count, num_tokens, head_dim), generator=generator).to(device, torch.bfloat16).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    )
    module = nn.Module()
    module.__dict__["num_key_value_groups"] = heads // kv_heads
    found = []
    try:
        for kernel in (Kernel.BLOCKS, Kernel.VARLEN):
            mask = packed_mask(segments, device, kernel).under(lambda _b, _h, q, k: k <= q, is_causal=True)
            with torch.enable_grad():
                attended, _ = packed_attention(module, query, key, value, mask)
                gradients = torch.autograd.grad(attended.float().square().sum(), (query, key, value))
            found.append([attended.detach(), *gradients])
    except (RuntimeError, NotImplementedError, ValueError, ImportError):
        return False
    return all(_gap(theirs, ours) <= _KERNEL_TOLERANCE for ours, theirs in zip(*found, strict=True))


@torch.no_grad()
def _failure(model: PreTrainedModel, head: OutputHead, layout: Layout) -> str:
    """Why `layout` is not right for this model; empty where it is."""
    device = next(model.parameters()).device
    token_ids = _token_ids(model, device)
    segments = _segments(layout)
    row = torch.cat([token_ids[start:stop] for start, stop in _pieces(layout)])[None]
    mask = packed_mask(segments, device, Kernel.BLOCKS)
    positions = torch.from_numpy(segments.positions[None]).to(device)
    expected, routing = _alone(model, head, token_ids, layout)
    try:
        with _replaying(model, routing):
            gap = _gap(head.states(row, mask, positions)[0], expected)
            if gap <= _TOLERANCE:
                return ""
            heeded = _gap(head.states(row, mask, torch.arange(row.shape[1], device=device)[None])[0], expected)
    except (AttributeError, TypeError, ValueError, RuntimeError, LookupError) as error:
        return f"it does not take a packed row: {_first_line(error)}"
    if expected.dtype in {torch.float32, torch.float64} or not gap <= _NARROW_TOLERANCE:
        return f"its states differ by {gap:.2g} from those of sequences that are alone"
    # Half precision rounds differently in every kernel; positions that count on must be off by more.
    return "" if heeded > 2 * gap else "rounding hides whether it heeds positions"


def _alone(
    model: PreTrainedModel, head: OutputHead, token_ids: Tensor, layout: Layout
) -> tuple[Tensor, Routing | None]:
    """States of the row's tokens, each sequence by itself, [N, H]; and the experts they went to, if there are any."""
    states: list[Tensor] = []
    chosen: list[Tensor] = []
    recorder = RoutingRecorder(model) if has_known_routers(model) else None
    start = 0
    for length in _SEQUENCES:
        ids = token_ids[start : start + length][None]
        if recorder is None:
            states.append(head.states(ids, None, None)[0])
        else:
            with recorder.recording() as layers:
                states.append(head.states(ids, None, None)[0])
            chosen.append(torch.stack(layers, dim=1))
        start += length
    pieces = [slice(*piece) for piece in _pieces(layout)]
    expected = torch.cat([torch.cat(states)[piece] for piece in pieces])
    if recorder is None:
        return expected, None
    experts = torch.cat([torch.cat(chosen)[piece] for piece in pieces])[None]
    is_recorded = torch.ones(experts.shape[:2], dtype=torch.bool, device=experts.device)
    return expected, Routing(experts=experts, is_recorded=is_recorded, num_experts=recorder.num_experts)


@contextmanager
def _replaying(model: PreTrainedModel, routing: Routing | None) -> Iterator[None]:
    """That two kernels round a close decision between experts apart is not the layout's fault."""
    if routing is None:
        yield
        return
    replay = RoutingReplay(model)
    try:
        with replay.using(routing):
            yield
    finally:
        replay.remove()


def _token_ids(model: PreTrainedModel, device: torch.device) -> Tensor:
    """Ids of the three sequences, one after the other; the first two begin with the same prompt."""
    ids = torch.arange(1, sum(_SEQUENCES) + 1, device=device) % int(model.config.get_text_config().vocab_size)
    second = _SEQUENCES[0]
    ids[second : second + _PROMPT] = ids[:_PROMPT]
    return ids


def _pieces(layout: Layout) -> list[tuple[int, int]]:
    """Which tokens of the sequences are in the row, as bounds."""
    total = sum(_SEQUENCES)
    if layout is Layout.PACKED:
        return [(0, total)]
    return [(0, _SEQUENCES[0]), (_SEQUENCES[0] + _PROMPT, total)]


def _segments(layout: Layout) -> Segments:
    if layout is Layout.PACKED:
        lengths, prefixes = np.array(_SEQUENCES), np.zeros(len(_SEQUENCES), dtype=np.int64)
    else:
        lengths, prefixes = np.array([_PROMPT, *_COMPLETIONS, _OTHER]), np.array([0, _PROMPT, _PROMPT, 0])
    return Segments(lengths=lengths, prefix_starts=np.zeros_like(lengths), prefix_lengths=prefixes)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _gap(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, in units of the largest value."""
    return float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max().clamp(min=1e-12))
