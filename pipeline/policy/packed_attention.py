"""Attention over a packed row, in place of transformers' own.

In: transformers' attention and mask interfaces. Out: for a row of segments the numbers that its
`sdpa` gives for each sequence alone; for anything else `sdpa` itself. What rides through the model
as its attention mask is the description of the row, so layers that know nothing of packing pass it on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from pipeline.batching import Segments
from pipeline.policy.blocks import Block, Blocks, Flat, flatten, make_blocks

NAME = "rollstream_packed"

# Indices of batch, head, query and key -> whether the query sees the key.
Rule: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Kernel(StrEnum):
    """What computes attention: `sdpa` on blocks, or torch's flash attention for variable lengths."""

    BLOCKS = "blocks"
    VARLEN = "varlen"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedMask:
    """The attention mask of a packed row of N tokens.

    masks: for each block [S or 1, 1, Q, K] bool, None where causality says it all. flat: what a kernel
    of variable lengths needs, None where there is none or the rule is not plain causality. To
    transformers it looks like a mask of three dimensions, which it hands to `_make_mask` as it is.
    """

    num_tokens: int
    blocks: Blocks
    flat: Flat | None = None
    masks: tuple[Tensor | None, ...] = ()
    ndim: int = field(default=3, init=False)

    @property
    def shape(self) -> tuple[int, int, int]:
        """As of a tensor [1, 1, N]."""
        return 1, 1, self.num_tokens

    def under(self, rule: Rule, *, is_causal: bool) -> PackedMask:
        """With the masks of a kind of layer. is_causal: the rule says no more than that."""
        masks = tuple(
            None if block.is_square and is_causal else _block_mask(block, rule) for block in self.blocks.blocks
        )
        return replace(self, masks=masks, flat=self.flat if is_causal else None)


def packed_mask(segments: Segments, device: torch.device, kernel: Kernel) -> PackedMask:
    """What a model that uses packed attention takes as the mask of a row."""
    return PackedMask(
        num_tokens=int(segments.lengths.sum()),
        blocks=make_blocks(segments, device),
        flat=flatten(segments, device) if kernel is Kernel.VARLEN else None,
    )


def supports_packed_attention(model: PreTrainedModel) -> bool:
    """Whether a model's attention can be replaced: it was loaded with `sdpa`, through transformers' interface."""
    return model.config._attn_implementation in {"sdpa", NAME} and bool(model._supports_attention_backend)


def use_packed_attention(model: PreTrainedModel, *, is_used: bool = True) -> None:
    """Switch a model that supports it to packed attention, or back."""
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, _make_mask)
    model.set_attn_implementation(NAME if is_used else "sdpa")


def call_outside_of_graphs() -> None:
    """From now on packed attention is left out of what `torch.compile` makes of a layer."""
    outside = torch.compiler.disable(packed_attention, reason="every row is another")  # type: ignore[no-untyped-call]
    AttentionInterface.register(NAME, outside)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | PackedMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query: [1, heads, N, d]. key, value: [1, kv_heads, N, d]. Returns [1, N, heads, d]."""
    if not isinstance(attention_mask, PackedMask):
        attended, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
        return attended, None
    if kwargs.get("position_bias") is not None:
        raise NotImplementedError("a bias on positions is not packed")
    rows = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))  # [N, heads, d]
    if attention_mask.flat is not None and (narrow := _narrow(*rows)) is not None:
        return _varlen(attention_mask.flat, *narrow, scaling)[None], None
    parts = [
        _attend(module, block, mask, *rows, scaling=scaling, dropout=dropout)
        for block, mask in zip(attention_mask.blocks.blocks, attention_mask.masks, strict=True)
    ]
    return torch.cat(parts).index_select(0, attention_mask.blocks.order)[None], None


def _attend(
    module: nn.Module, block: Block, mask: Tensor | None, query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> Tensor:
    """[S * Q, heads, d], padding included: it gets a number that nobody asks for, and has no gradient."""
    rows = (_gather(query, block.queries), _gather(key, block.keys), _gather(value, block.keys))
    attended, _ = sdpa_attention_forward(module, *rows, mask, is_causal=mask is None, **options)
    return attended.flatten(0, 1)


def _gather(rows: Tensor, places: Tensor) -> Tensor:
    """Rows [N, heads, d] at places [S, L], as [S, heads, L, d]."""
    return rows.index_select(0, places.flatten()).view(*places.shape, *rows.shape[1:]).transpose(1, 2)


def _varlen(flat: Flat, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """[N, heads, d]. The queries of a segment are the last of its keys."""
    from torch.nn.attention.varlen import varlen_attn

    attended = varlen_attn(
        query.contiguous(),
        key.index_select(0, flat.keys),
        value.index_select(0, flat.keys),
        flat.query_bounds,
        flat.key_bounds,
        flat.most_queries,
        flat.most_keys,
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(attended, Tensor)
    return attended


def _narrow(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """In the half precision that flash attention needs, as autocast makes it for `sdpa`; None in any other."""
    dtype = query.dtype
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
    if dtype not in {torch.float16, torch.bfloat16}:
        return None
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _make_mask(
    *,
    attention_mask: Tensor | PackedMask | None = None,
    mask_function: Any = causal_mask_function,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    use_vmap: bool = False,
    **options: Any,
) -> Tensor | PackedMask | None:
    """transformers' mask interface. local_size: of a window, in tokens."""
    if not isinstance(attention_mask, PackedMask):
        mask: Tensor | None = sdpa_mask(
            attention_mask=attention_mask,
            mask_function=mask_function,
            allow_is_causal_skip=allow_is_causal_skip,
            local_size=local_size,
            use_vmap=use_vmap,
            **options,
        )
        return mask
    if use_vmap:
        raise NotImplementedError("a mask that is not a function of positions is not packed")
    is_causal = mask_function is causal_mask_function or (
        local_size is not None and attention_mask.blocks.longest < local_size
    )
    return attention_mask.under(mask_function, is_causal=is_causal and allow_is_causal_skip)


def _block_mask(block: Block, rule: Rule) -> Tensor:
    """Which keys the queries of a block see, [S or 1, 1, Q, K]. Every query sees itself, so no row is empty."""
    queries, keys = block.query_positions[:, None, :, None], block.key_positions[:, None, None, :]
    zero = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=queries.device)
    return rule(zero, zero, queries, keys) & (keys >= 0)
