"""Attention for decode steps, where every row asks with one token.

In: transformers' attention interface. Out: the same numbers as its `sdpa`, without copying keys and
values for each query head of a group: the heads that share keys become the queries of one head.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

_NAME = "rollstream_rows"


def use_row_attention(model: Any) -> None:
    """Switch a model that was loaded with `sdpa`; anything else is left as it is."""
    if model.config._attn_implementation == "sdpa" and model._supports_attention_backend:
        AttentionInterface.register(_NAME, _row_attention)
        model.set_attn_implementation(_NAME)


def _row_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query: [n, heads, q, d]. key, value: [n, kv_heads, columns, d]. Returns [n, q, heads, d]."""
    num_rows, num_heads, num_queries, _ = query.shape
    num_groups = num_heads // key.shape[1]
    if num_queries > 1 or num_groups == 1 or kwargs.get("position_bias") is not None:
        attended, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return attended, None
    attended = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(num_rows, key.shape[1], num_groups, -1), key, value, attn_mask=attention_mask, scale=scaling
    )
    return attended.reshape(num_rows, 1, num_heads, -1), None
