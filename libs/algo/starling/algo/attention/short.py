"""Attention of short sequences: runs of segments with the keys of their paths, in a few batched products.

A fused kernel's call costs more than the arithmetic of a few tokens, and so does merging what calls return. Where all
sequences of a forest are short, its segments are divided into runs in preorder instead. What a run's tokens see are the
tokens of the run itself, and the ancestors of its first segment, of which each run has its own copies: the products of
all runs are one batch, with a mask.

Legend of shapes: T tokens, H query heads, G key heads, F = H / G, D head dimension; a batch has B runs of at most N
tokens, with at most M keys each. The scores take H x M numbers for each token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
"""Most copies of a key, on average, if each segment were a run of its own; runs of several segments make fewer."""
RUN_PAIRS: Final = 128
"""Query-key pairs, hidden ones included, of one head, that cost about as much as one more run."""


def is_short(forest: Forest) -> bool:
    """Return whether all sequences of `forest` are short, and a run per segment would copy few keys."""
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
        layout = _layout(forest, window, query.shape[1], key.shape[1], query.device)
        outputs, saved = list[Tensor](), list[Tensor]()
        for batch in layout.batches:
            queries, keys, values = batch.queries_of(query), batch.keys_of(key), batch.keys_of(value)
            bias = batch.bias.to(queries.dtype)
            weights = torch.baddbmm(bias, queries, keys.transpose(1, 2), alpha=scale).softmax(-1)
            outputs.append(torch.bmm(weights, values))
            saved += (queries, keys, values, weights)
        ctx.layout, ctx.scale = layout, scale
        ctx.save_for_backward(*saved)
        return layout.tokens_of(outputs, query)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        layout: _Layout = ctx.layout
        saved, of_queries = ctx.saved_tensors, list[Tensor]()
        of_key, of_value = (layout.zeros_of_keys(saved[1]) for _ in range(2))
        for number, batch in enumerate(layout.batches):
            queries, keys, values, weights = saved[4 * number : 4 * number + 4]
            of_output = batch.queries_of(gradient, clear_padding=True)
            of_weights = torch.bmm(of_output, values.transpose(1, 2))
            of_scores = torch._softmax_backward_data(of_weights, weights, -1, weights.dtype).mul_(ctx.scale)
            of_queries.append(torch.bmm(of_scores, keys))
            of_key.index_add_(0, batch.keys, torch.bmm(of_scores.transpose(1, 2), queries).flatten(0, 1))
            of_value.index_add_(0, batch.keys, torch.bmm(weights.transpose(1, 2), of_output).flatten(0, 1))
        of_query = layout.tokens_of(of_queries, gradient)
        shape = len(gradient), layout.num_groups, -1
        return of_query, *(one.view(shape).to(gradient.dtype) for one in (of_key, of_value)), None, None, None


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Runs that are padded to one size. A row is what a token has for one key head: [T * G, ...] of a tensor."""

    num_groups: int
    """G."""
    queries: Tensor
    """int64 [B * G * N]: rows; padding repeats the last token of a run."""
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
        return rows.to(torch.promote_types(tensor.dtype, torch.float32))


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """The batches of a forest; they hold each of its tokens once as a query."""

    num_groups: int
    batches: tuple[_Batch, ...]
    places: Tensor
    """int64 [T * G]: where the queries of all batches, end to end, have each row."""

    def tokens_of(self, found: Sequence[Tensor], like: Tensor) -> Tensor:
        """Return what batches found for their queries, [B * G, N * F, D] each, as a tensor `like` [T, H, D]."""
        width = like[0].numel() // self.num_groups
        rows = [one.view(-1, width) for one in found]
        joined = rows[0] if len(rows) == 1 else torch.cat(rows)
        return joined.index_select(0, self.places).to(like.dtype).view(like.shape)

    def zeros_of_keys(self, keys: Tensor) -> Tensor:
        """Return zeros for each row of a tensor of which `keys` [B * G, M, D] are copies: [T * G, D]."""
        return keys.new_zeros(len(self.places), keys.shape[-1])


@dataclass(frozen=True, slots=True)
class _Run:
    """Segments one behind another in preorder."""

    start: int
    """First token."""
    num_tokens: int
    first: int
    """Segment."""
    depth: int
    """Tokens of its ancestors."""

    @property
    def num_keys(self) -> int:
        return self.depth + self.num_tokens


@lru_cache(maxsize=64)
def _layout(forest: Forest, window: int | None, num_heads: int, num_groups: int, device: torch.device) -> _Layout:
    """Return the layout of a forest."""
    batches, begin = list[_Batch](), 0
    places = np.empty((forest.num_tokens, num_groups), np.int64)
    groups = np.arange(num_groups)
    for runs in _alike(_runs(forest)):
        queries, is_padding = _queries(runs)
        keys, hidden = _keys(forest, runs, queries, window)
        shape = len(runs), num_groups, queries.shape[1], num_heads // num_groups, keys.shape[1]
        own = begin + np.arange(np.prod(shape[:3])).reshape(shape[:3])
        begin += own.size
        places[queries[~is_padding]] = own.transpose(0, 2, 1)[~is_padding]
        bias = np.where(hidden, np.float32(-np.inf), np.float32(0))[:, None, :, None]
        arrays = (
            (queries[:, None] * num_groups + groups[:, None]).ravel(),
            np.flatnonzero(np.broadcast_to(is_padding[:, None], shape[:3])),
            (keys[:, None] * num_groups + groups[:, None]).ravel(),
            np.broadcast_to(bias, shape).reshape(shape[0] * shape[1], -1, shape[-1]),
        )
        batches.append(_Batch(num_groups, *(torch.from_numpy(array.copy()).to(device) for array in arrays)))
    return _Layout(num_groups, tuple(batches), torch.from_numpy(places.ravel()).to(device))


def _queries(runs: Sequence[_Run]) -> tuple[Index, Any]:
    """Return the tokens of each run, [B, N], the last one repeated, and which of them are repetitions."""
    starts, lengths = np.array([(run.start, run.num_tokens) for run in runs], np.int64).T[:, :, None]
    offsets = np.arange(lengths.max())
    return starts + np.minimum(offsets, lengths - 1), offsets >= lengths


def _keys(forest: Forest, runs: Sequence[_Run], queries: Index, window: int | None) -> tuple[Index, Any]:
    """Return the keys of each run, [B, M], others behind; and which of them queries do not see, [B, N, M]."""
    keys = np.zeros((len(runs), max(run.num_keys for run in runs)), np.int64)
    for own, run in zip(keys, runs, strict=True):
        for segment in forest.path(run.first)[:-1]:
            start, depth, length = forest.starts[segment], forest.depths[segment], forest.lengths[segment]
            own[depth : depth + length] = np.arange(start, start + length)
        own[run.depth : run.num_keys] = np.arange(run.start, run.start + run.num_tokens)
    behind = np.array(forest.ends, np.int64)[forest.segment_of_tokens]
    is_padding = np.arange(keys.shape[1]) >= np.array([run.num_keys for run in runs])[:, None]
    behind = np.where(is_padding, 0, behind[keys])
    hidden = (keys[:, None] > queries[:, :, None]) | (behind[:, None] <= queries[:, :, None])
    if window is not None:
        hidden |= forest.positions[queries][:, :, None] - forest.positions[keys][:, None] >= window
    return keys, hidden


def _runs(forest: Forest) -> Iterator[_Run]:
    """Divide the segments into runs, such that hidden pairs cost less than more of them would."""
    run: _Run | None = None
    for segment, (start, length, depth) in enumerate(zip(forest.starts, forest.lengths, forest.depths, strict=True)):
        if run is not None:
            grown = run.num_tokens + length
            added = grown * (run.depth + grown) - run.num_tokens * run.num_keys
            if added - length * (depth + length) <= RUN_PAIRS:
                run = _Run(run.start, grown, run.first, run.depth)
                continue
            yield run
        run = _Run(start, length, segment, depth)
    if run is not None:
        yield run


def _alike(runs: Iterator[_Run]) -> Iterator[list[_Run]]:
    """Divide runs into batches, such that padding costs less than more of them would."""
    batch: list[_Run] = []
    num_queries = pairs = 0
    for run in sorted(runs, key=lambda run: (-run.num_keys, -run.num_tokens)):
        widest, own = max(num_queries, run.num_tokens), run.num_tokens * run.num_keys
        if batch and (len(batch) + 1) * widest * batch[0].num_keys - pairs - own > CALL_PAIRS:
            yield batch
            batch, pairs, widest = [], 0, run.num_tokens
        batch.append(run)
        num_queries, pairs = widest, pairs + own
    yield batch
