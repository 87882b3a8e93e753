"""Decode attention for grouped-query models, registered with transformers.

With one query token per row, the query heads that share a key head take the place of query positions, so that keys and
values are read from the cache in place. The stock function copies them once per query head instead, which for a small
model costs more than the rest of its forward pass.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED_DECODE: Final = "starling_grouped_decode"


def grouped_decode_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from `query` [rows, heads, q, dim] to `key`, `value` [rows, kv_heads, k, dim].

    Returns [rows, q, heads, dim], and None for the attention weights. Calls with several query tokens, without shared
    key heads, or with a mask per head go to the stock function.
    """
    rows, heads, q_len, dim = query.shape
    kv_heads = key.shape[1]
    per_head = attention_mask is not None and attention_mask.shape[1] != 1
    if q_len != 1 or heads == kv_heads or per_head or kwargs.get("position_bias") is not None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output, None
    folded = query.reshape(rows, kv_heads, heads // kv_heads, dim)
    output = torch.nn.functional.scaled_dot_product_attention(
        folded, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return output.reshape(rows, 1, heads, -1), None


def use_grouped_decode(model: PreTrainedModel) -> None:
    """Make `model` use `grouped_decode_attention` if it uses sdpa attention."""
    AttentionInterface.register(GROUPED_DECODE, grouped_decode_attention)
    AttentionMaskInterface.register(GROUPED_DECODE, sdpa_mask)
    if model.config._attn_implementation == "sdpa" and model._can_set_attn_implementation():
        model.set_attn_implementation(GROUPED_DECODE)
