"""Attention of a packed row by any of the backends."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from starling.algo.attention.forest import Forest
from starling.algo.attention.segments import segment_attention

Backend = Literal["segments", "flex", "varlen"]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    structure: Forest,
    scale: float,
    *,
    window: int | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Return the attention of a packed row, as if each sequence of its forest were alone.

    Args:
        query: [T, H, D], T tokens and H heads.
        key: [T, G, D]; each key head serves H / G query heads.
        value: [T, G, E].
        structure: which tokens attend to which.
        scale: factor of the scores.
        window: tokens of a sequence that each token sees, itself included; None for all up to itself.
        backend: of the computation; by default chosen by device.

    Returns:
        [T, H, E].
    """
    assert len(query) == structure.num_tokens, "the structure is that of another row"
    size = value.shape[-1]
    if size < query.shape[-1]:  # The kernels have one head dimension.
        value = torch.nn.functional.pad(value, (0, query.shape[-1] - size))
    output = segment_attention(query, key, value, structure, scale, window)
    return output[..., :size]
