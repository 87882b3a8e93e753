"""Attention by segments: fused kernels on parts of the row, merged by log-sum-exp, on every device.

A query's attention to two sets of keys, with outputs o1, o2 and log-sum-exps l1, l2, merges exactly into that to both:

    l = log(exp(l1) + exp(l2)),   o = o1 exp(l1 - l) + o2 exp(l2 - l)

as in ring attention (Liu et al., arXiv:2310.01889). The backward pass calls each kernel's own with the merged o and l,
which gives the gradients of the merged attention; they add up over the parts. Legend of shapes: T tokens, H query
heads, G key heads, D head dimension; each key head serves H / G query heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from starling.algo.attention.calls import KernelCall, kernel_calls
from starling.algo.attention.forest import Forest
from starling.algo.attention.kernels import kernel_for


def segment_attention(
    query: Tensor, key: Tensor, value: Tensor, forest: Forest, scale: float, window: int | None = None
) -> Tensor:
    """Return the attention of a packed row, [T, H, D]; see `starling.algo.attention.interface.attention`."""
    if query.dtype != key.dtype or query.dtype != value.dtype:
        key, value = key.to(query.dtype), value.to(query.dtype)
    output: Tensor = _SegmentAttention.apply(query, key, value, forest, scale, window)  # type: ignore[no-untyped-call]
    return output


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, forest: Forest, scale: float, window: int | None
    ) -> Tensor:
        kernel = kernel_for(query)
        levels = kernel_calls(forest, window, query.device, with_bias=kernel.takes_bias)
        merged = _Merged(query, is_merged=len(levels) > 1)
        heads = query.shape[1], key.shape[1]
        for number, calls in enumerate(levels):
            for call in calls:
                output, logsumexp = kernel.forward(
                    _queries(call, query, heads),
                    _keys(call, key, heads),
                    _keys(call, value, heads),
                    call.bias(query.dtype),
                    causal=call.causal,
                    scale=scale,
                )
                own = _rows(call, output), _rows(call, logsumexp)
                if number == 0:
                    merged.write(call, *own)
                else:
                    merged.add(call, *own)
        result = merged.output[: len(query)].to(query.dtype)
        ctx.kernel, ctx.levels, ctx.scale = kernel, levels, scale
        ctx.save_for_backward(query, key, value, result, merged.logsumexp)
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, logsumexp = ctx.saved_tensors
        heads = query.shape[1], key.shape[1]
        sums = [_Sum(one, is_merged=len(ctx.levels) > 1) for one in (query, key, value)]
        for number, calls in enumerate(ctx.levels):
            for call in calls:
                found = ctx.kernel.backward(
                    _queries(call, gradient, heads, clear_padding=True),
                    (_queries(call, query, heads), _keys(call, key, heads), _keys(call, value, heads)),
                    (_queries(call, output, heads), _queries(call, logsumexp, heads)),
                    call.bias(query.dtype),
                    causal=call.causal,
                    scale=ctx.scale,
                )
                sums[0].add(call.query, call.queries, call.targets, _rows(call, found[0]), first=number == 0)
                for total, own in zip(sums[1:], found[1:], strict=True):
                    rows = _rows(call, _sum_heads(call, own, heads))
                    total.add(call.key, call.keys, call.targets, rows, first=number == 0)
        return *(total.total(query.dtype) for total in sums), None, None, None


class _Merged:
    """Output and log-sum-exp of the calls so far; one more row, which takes the padding of batched calls."""

    def __init__(self, query: Tensor, *, is_merged: bool) -> None:
        shape = len(query) + 1, *query.shape[1:]
        wide = torch.promote_types(query.dtype, torch.float32)
        self.output = query.new_empty(shape, dtype=wide if is_merged else query.dtype)
        self.logsumexp = query.new_empty(shape[:2], dtype=wide)

    def write(self, call: KernelCall, output: Tensor, logsumexp: Tensor) -> None:
        """Set the rows of the call's queries."""
        for total, own in ((self.output, output), (self.logsumexp, logsumexp)):
            if call.targets is None:
                total[call.query : call.query + call.num_queries] = own
            else:
                total.index_copy_(0, call.targets, own.to(total.dtype))

    def add(self, call: KernelCall, output: Tensor, logsumexp: Tensor) -> None:
        """Merge the call into the rows of its queries."""
        if call.targets is None:
            rows = slice(call.query, call.query + call.num_queries)
            old_output, old = self.output[rows], self.logsumexp[rows]
        else:
            old_output, old = (one.index_select(0, call.targets) for one in (self.output, self.logsumexp))
        both = torch.logaddexp(old, logsumexp)
        old_output.mul_((old - both).exp_()[:, :, None])
        old_output.addcmul_(output.to(old_output.dtype), (logsumexp - both).exp_()[:, :, None])
        self.write(call, old_output, both)


class _Sum:
    """Gradient of one input, summed over the calls."""

    def __init__(self, like: Tensor, *, is_merged: bool) -> None:
        wide = torch.promote_types(like.dtype, torch.float32) if is_merged else like.dtype
        self._sum = like.new_empty((len(like) + 1, *like.shape[1:]), dtype=wide)

    def add(self, start: int, rows: Tensor | None, targets: Tensor | None, own: Tensor, *, first: bool) -> None:
        """Add the gradient of a call at its rows; the calls of the `first` level hold each row once."""
        own = own.to(self._sum.dtype)
        if rows is None and first:
            self._sum[start : start + len(own)] = own
        elif rows is None:
            self._sum[start : start + len(own)] += own
        elif first:
            assert targets is not None
            self._sum.index_copy_(0, targets, own)
        else:
            self._sum.index_add_(0, rows, own)

    def total(self, dtype: torch.dtype) -> Tensor:
        return self._sum[:-1].to(dtype)


def _queries(call: KernelCall, rows: Tensor, heads: tuple[int, int], *, clear_padding: bool = False) -> Tensor:
    """Return the rows of the call's queries, [T, H, ...], as the kernel reads them.

    [G, H / G, Q, ...] where they are read in place, else [B, H, Q, ...].
    """
    if call.queries is None:
        rows = rows[call.query : call.query + call.num_queries]
        return _divided(rows, 1, heads[1]).movedim(0, 2)
    found = rows.index_select(0, call.queries)
    if clear_padding and call.padding is not None:
        found.index_fill_(0, call.padding, 0.0)
    return _divided(found, 0, call.num_parts).transpose(1, 2)


def _keys(call: KernelCall, rows: Tensor, heads: tuple[int, int]) -> Tensor:
    """Return the rows of the call's keys, [T, G, D], once for each query head: read in place they are not copied."""
    num_heads, num_groups = heads
    if call.keys is None:
        found = rows[call.key : call.key + call.num_keys].transpose(0, 1)[:, None]
        return found.expand(-1, num_heads // num_groups, -1, -1)
    found = _divided(rows.index_select(0, call.keys), 0, call.num_parts)
    if num_heads > num_groups:
        found = found[:, :, :, None].expand(-1, -1, -1, num_heads // num_groups, -1).flatten(2, 3)
    return found.transpose(1, 2)


def _sum_heads(call: KernelCall, gradient: Tensor, heads: tuple[int, int]) -> Tensor:
    """Sum the gradient of the call's keys over the query heads of each key head."""
    num_heads, num_groups = heads
    if call.keys is None:
        return gradient.sum(1, keepdim=True)
    return gradient if num_heads == num_groups else _divided(gradient, 1, num_groups).sum(2)


def _rows(call: KernelCall, found: Tensor) -> Tensor:
    """Return a result of the kernel, [G, H / G, Q, ...] or [B, H, Q, ...], by rows: [Q, H, ...] or [B * Q, H, ...]."""
    if call.queries is None:
        return found.movedim(2, 0).flatten(1, 2)
    return found.transpose(1, 2).flatten(0, 1)


def _divided(rows: Tensor, axis: int, count: int) -> Tensor:
    """Return `rows` with one axis divided in two, of which the first has `count` elements."""
    return rows.reshape(*rows.shape[:axis], count, -1, *rows.shape[axis + 1 :])
