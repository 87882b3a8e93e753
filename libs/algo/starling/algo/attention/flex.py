"""Attention by FlexAttention: one kernel for the row, with a mask of blocks.

A token sees another one if that is before it, and its segment an ancestor: with the segments in preorder, if it lies
before the end of that segment's descendants. The mask of blocks follows from the least and greatest of these ends, and
of the positions, in each block of 128 tokens: nothing has an element for each pair of tokens. FlexAttention is compiled
on CUDA devices; on a CPU it has no backward pass, and takes memory for all pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from starling.algo.attention.forest import Flags, Forest
from starling.algo.attention.kernels import Inputs
from starling.common.errors import ConfigError

BLOCK: Final = 128
"""Tokens of a block of queries or keys."""


def forest_flex_attention(
    inputs: Inputs, forest: Forest, scale: float, *, window: int | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Return the attention of a packed row, [T, H, D]; see `starling.algo.attention.interface.attention`.

    Raises:
        ConfigError: gradients are required on a CPU.
    """
    query, key, _ = inputs
    if query.device.type == "cpu" and any(one.requires_grad for one in inputs):
        raise ConfigError("FlexAttention has no backward pass on a CPU: set policy.attention to auto or segments")
    output, aux = _flex(query.device.type)(
        *(one.transpose(0, 1)[None] for one in inputs),
        score_mod=None if softcap is None else _capped(softcap),
        block_mask=block_mask(forest, window, query.device),
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    if sinks is not None:  # One more key with a value of zero.
        output = output * (aux.lse - sinks[None, :, None]).sigmoid()[..., None].to(output.dtype)
    rows: Tensor = output[0].transpose(0, 1)
    return rows


@lru_cache(maxsize=64)
def block_mask(forest: Forest, window: int | None, device: torch.device) -> BlockMask:
    """Return which tokens of a row see which others, by blocks.

    Args:
        forest: of the row.
        window: tokens of a sequence that each token sees, itself included; None for all up to itself.
        device: of the mask.
    """
    some, whole = visible_blocks(forest, window)
    counts, numbers, whole_counts, whole_numbers = (
        torch.from_numpy(array.astype(np.int32))[None, None].to(device)
        for flags in (some & ~whole, whole)
        for array in (flags.sum(1), np.argsort(~flags, axis=1, kind="stable"))
    )
    behind = torch.tensor(forest.ends, device=device)[torch.from_numpy(forest.segment_of_tokens).to(device)]
    positions = torch.from_numpy(forest.positions).to(device)

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < behind[key])

    reach = forest.num_tokens if window is None else window

    def sees_in_window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return sees(batch, head, query, key) & (positions[query] - positions[key] < reach)

    return BlockMask.from_kv_blocks(
        counts,
        numbers,
        whole_counts,
        whole_numbers,
        BLOCK_SIZE=BLOCK,
        mask_mod=sees if window is None else sees_in_window,
        seq_lengths=(forest.num_tokens, forest.num_tokens),
    )


def visible_blocks(forest: Forest, window: int | None) -> tuple[Flags, Flags]:
    """Return in which blocks some queries see some keys, and in which all see all: bool [blocks, blocks]."""
    firsts = np.arange(0, forest.num_tokens, BLOCK, dtype=np.int64)
    lasts = np.minimum(firsts + BLOCK, forest.num_tokens) - 1
    behind = np.array(forest.ends, dtype=np.int64)[forest.segment_of_tokens]
    before = lasts[None] < firsts[:, None]
    some = np.eye(len(firsts), dtype=np.bool_) | (before & (np.maximum.reduceat(behind, firsts) > firsts[:, None]))
    whole = before & (np.minimum.reduceat(behind, firsts) > lasts[:, None])
    whole[lasts - firsts < BLOCK - 1] = False  # The kernel does not look for the end of the row in a whole block.
    if window is not None:
        low, high = np.minimum.reduceat(forest.positions, firsts), np.maximum.reduceat(forest.positions, firsts)
        some &= low[:, None] - high[None] < window
        whole &= high[:, None] - low[None] < window
    return some, whole & some


def _capped(bound: float) -> Callable[..., Tensor]:
    def cap(score: Tensor, _batch: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        return bound * torch.tanh(score / bound)

    return cap


@lru_cache(maxsize=2)
def _flex(device: str) -> Callable[..., Any]:
    function: Any = flex_attention
    compiled: Callable[..., Any] = torch.compile(function) if device == "cuda" else function
    return compiled
