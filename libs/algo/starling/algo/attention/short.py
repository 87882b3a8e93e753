"""Attention of short sequences: each segment with the keys of its whole path, in a few batched products.

A fused kernel's call costs more than the arithmetic of a few tokens, and so does merging what calls return. Where all
sequences of a forest are short, each segment gets copies of its ancestors' keys instead, as if nothing was shared. In a
path the column of a key is its position, so the mask follows from two numbers for each segment.

Legend of shapes: T tokens, S segments, H query heads, G key heads, F = H / G, D head dimension; a batch has B segments
of at most N tokens, with at most M keys each. The scores take H x M numbers for each token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from starling.algo.attention.calls import CALL_PAIRS
from starling.algo.attention.forest import Forest, Index
from starling.algo.attention.kernels import Inputs

SHORT_TOKENS: Final = 128
"""Most tokens of a short sequence."""
COPIES: Final = 8
"""How often a key may be copied, on average."""


def is_short(forest: Forest) -> bool:
    """Return whether all sequences of `forest` are short, and their segments not much shorter."""
    ends = [depth + length for depth, length in zip(forest.depths, forest.lengths, strict=True)]
    return max(ends, default=0) <= SHORT_TOKENS and sum(ends) <= COPIES * forest.num_tokens


def short_attention(inputs: Inputs, forest: Forest, scale: float, *, window: int | None) -> Tensor:
    """Return the attention of a packed row, [T, H, D]; see `starling.algo.attention.interface.attention`."""
    output: Tensor = _ShortAttention.apply(*inputs, forest, scale, window)  # type: ignore[no-untyped-call]
    return output


class _ShortAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, forest: Forest, scale: float, window: int | None
    ) -> Tensor:
        batches = _batches(forest, window, query.shape[1], key.shape[1], query.device)
        output, all_weights = _Rows(query, key.shape[1]), list[Tensor]()
        for batch in batches:
            queries, keys, values = batch.queries_of(query), batch.keys_of(key), batch.keys_of(value)
            bias = batch.bias.to(queries.dtype)
            weights = torch.baddbmm(bias, queries, keys.transpose(1, 2), alpha=scale).softmax(-1)
            output.write(batch.targets, weights @ values)
            all_weights.append(weights)
        ctx.batches, ctx.scale = batches, scale
        ctx.save_for_backward(query, key, value, *all_weights)
        return output.tensor()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *all_weights = ctx.saved_tensors
        of_query, of_key, of_value = (_Rows(one, key.shape[1]) for one in (query, key, value))
        for batch, weights in zip(ctx.batches, all_weights, strict=True):
            queries, keys, values = batch.queries_of(query), batch.keys_of(key), batch.keys_of(value)
            of_output = batch.queries_of(gradient, clear_padding=True)
            of_weights = of_output @ values.transpose(1, 2)
            of_scores = torch._softmax_backward_data(of_weights, weights, -1, weights.dtype).mul_(ctx.scale)
            of_query.write(batch.targets, of_scores @ keys)
            of_key.add(batch.keys, of_scores.transpose(1, 2) @ queries)
            of_value.add(batch.keys, weights.transpose(1, 2) @ of_output)
        return of_query.tensor(), of_key.tensor(), of_value.tensor(), None, None, None


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Segments that are padded to one size. A row is what a token has for one key head: [T * G, ...] of a tensor."""

    num_groups: int
    """G."""
    queries: Tensor
    """int64 [B * G * N]: rows; padding repeats the last token of a segment."""
    targets: Tensor
    """`queries`, and T * G in place of padding."""
    padding: Tensor
    """int64: which of the queries are padding."""
    keys: Tensor
    """int64 [B * G * M]: rows; padding has a token that is hidden."""
    bias: Tensor
    """float32 [B * G, N * F, M]: minus infinity where a query does not see a key, else 0."""

    def queries_of(self, tensor: Tensor, *, clear_padding: bool = False) -> Tensor:
        """Return the batch's queries of `tensor` [T, H, D], as [B * G, N * F, D], in at least single precision."""
        rows = self._rows(tensor, self.queries)
        if clear_padding:
            rows.index_fill_(0, self.padding, 0.0)
        return rows.view(len(self.bias), -1, tensor.shape[-1])

    def keys_of(self, tensor: Tensor) -> Tensor:
        """Return the batch's keys of `tensor` [T, G, D], as [B * G, M, D], in at least single precision."""
        return self._rows(tensor, self.keys).view(len(self.bias), -1, tensor.shape[-1])

    def _rows(self, tensor: Tensor, index: Tensor) -> Tensor:
        rows = tensor.reshape(len(tensor) * self.num_groups, -1).index_select(0, index)
        return rows.to(_wide(tensor.dtype))


class _Rows:
    """A tensor like one of the inputs that batches write by rows; one more row takes their padding."""

    def __init__(self, like: Tensor, num_groups: int) -> None:
        self._like, self._count = like, len(like) * num_groups
        width = like[0].numel() // num_groups
        self._rows = like.new_zeros((self._count + 1, width), dtype=_wide(like.dtype))

    def write(self, rows: Tensor, found: Tensor) -> None:
        """Set each of `rows`."""
        self._rows.index_copy_(0, rows, found.reshape(len(rows), -1))

    def add(self, rows: Tensor, found: Tensor) -> None:
        """Add to `rows`, which may repeat."""
        self._rows.index_add_(0, rows, found.reshape(len(rows), -1))

    def tensor(self) -> Tensor:
        return self._rows[: self._count].to(self._like.dtype).view(self._like.shape)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@lru_cache(maxsize=64)
def _batches(
    forest: Forest, window: int | None, num_heads: int, num_groups: int, device: torch.device
) -> tuple[_Batch, ...]:
    """Return the batches of a forest; they hold each of its tokens once as a query."""
    paths = _paths(forest)
    found = []
    for chunk in _chunks(np.array(forest.lengths, np.int64), np.array(forest.depths, np.int64)):
        starts, lengths, depths = (
            np.array(one, np.int64)[chunk, None] for one in (forest.starts, forest.lengths, forest.depths)
        )
        offsets, columns = np.arange(lengths.max()), np.arange((depths + lengths).max())
        is_padding, last = offsets >= lengths, np.minimum(offsets, lengths - 1)
        positions = (depths + last)[:, :, None]
        hidden = columns > positions
        if window is not None:
            hidden |= columns <= positions - window
        bias = np.where(hidden, np.float32(-np.inf), np.float32(0))[:, None, :, None]
        shape = len(chunk), num_groups, len(offsets), num_heads // num_groups, len(columns)
        queries = _by_head(starts + last, num_groups)
        targets = np.where(is_padding[:, None], forest.num_tokens * num_groups, queries)
        keys = _by_head(paths[chunk][:, : len(columns)], num_groups)
        arrays = (
            queries.ravel(),
            targets.ravel(),
            np.flatnonzero(np.broadcast_to(is_padding[:, None], queries.shape)),
            keys.ravel(),
            np.broadcast_to(bias, shape).reshape(shape[0] * shape[1], -1, shape[-1]),
        )
        found.append(_Batch(num_groups, *(torch.from_numpy(array.copy()).to(device) for array in arrays)))
    return tuple(found)


def _by_head(tokens: Index, num_groups: int) -> Index:
    """Return the rows of `tokens` [B, tokens]: [B, G, tokens]."""
    rows: Index = tokens[:, None] * num_groups + np.arange(num_groups)[:, None]
    return rows


def _paths(forest: Forest) -> Index:
    """Return the tokens from the root of each segment to its end, [S, longest path]; others behind."""
    longest = max(map(sum, zip(forest.depths, forest.lengths, strict=True)), default=0)
    paths = np.zeros((len(forest.lengths), longest), np.int64)
    own = np.arange(longest)
    for segment, (start, length, depth) in enumerate(zip(forest.starts, forest.lengths, forest.depths, strict=True)):
        if depth:
            paths[segment] = paths[forest.parents[segment]]
        paths[segment, depth : depth + length] = start + own[:length]
    return paths


def _chunks(lengths: Index, depths: Index) -> Iterator[Index]:
    """Divide the segments into batches, such that padding costs less than more of them would."""
    ends = depths + lengths
    chunk: list[int] = []
    num_queries = pairs = 0
    for segment in np.lexsort((-lengths, -ends)).tolist():
        widest = max(num_queries, int(lengths[segment]))
        padded = (len(chunk) + 1) * widest * int(ends[chunk[0] if chunk else segment])
        own = int(lengths[segment] * ends[segment])
        if chunk and padded - pairs - own > CALL_PAIRS:
            yield np.array(chunk)
            chunk, pairs, widest = [], 0, int(lengths[segment])
        chunk.append(segment)
        num_queries, pairs = widest, pairs + own
    yield np.array(chunk)
