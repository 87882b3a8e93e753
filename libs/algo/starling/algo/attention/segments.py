"""Attention by segments: fused kernels on parts of the row, many small ones to a call, on every device.

Legend of shapes: T tokens, H query heads, G key heads, D head dimension; each key head serves H / G query heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from starling.algo.attention.calls import KernelCall, kernel_calls
from starling.algo.attention.capped import CappedKernel
from starling.algo.attention.forest import Forest
from starling.algo.attention.kernels import Inputs, Kernel, Outputs, kernel_for
from starling.algo.attention.merge import Runner, merged_attention


def segment_attention(
    inputs: Inputs, forest: Forest, scale: float, *, window: int | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Return the attention of a packed row, [T, H, D]; see `starling.algo.attention.interface.attention`."""
    query, key, _ = inputs
    kernel = kernel_for(query) if softcap is None else CappedKernel(softcap)
    levels = kernel_calls(forest, window, query.device, with_bias=kernel.takes_bias)
    return merged_attention(inputs, levels, padded_runner(kernel, query, key, scale), sinks)


def padded_runner(kernel: Kernel, query: Tensor, key: Tensor, scale: float) -> Runner:
    """Return what computes calls of `kernel` for tensors like `query` [..., H, D] and `key` [..., G, D]."""
    return _Padded(kernel, (query.shape[-2], key.shape[-2]), scale)


@dataclass(frozen=True, slots=True)
class _Padded:
    """Runs calls on parts that are padded to one size; see `Runner`."""

    kernel: Kernel
    heads: tuple[int, int]
    """H and G."""
    scale: float

    def forward(self, call: KernelCall, inputs: Inputs) -> Outputs:
        query, key, value = inputs
        output, logsumexp = self.kernel.forward(
            _queries(call, query, self.heads),
            _keys(call, key, self.heads),
            _keys(call, value, self.heads),
            call.bias(query.dtype),
            causal=call.causal,
            scale=self.scale,
        )
        return _rows(call, output), _rows(call, logsumexp)

    def backward(self, call: KernelCall, gradient: Tensor, inputs: Inputs, outputs: Outputs) -> Inputs:
        (query, key, value), (output, logsumexp), heads = inputs, outputs, self.heads
        found = self.kernel.backward(
            _queries(call, gradient, heads, clear_padding=True),
            (_queries(call, query, heads), _keys(call, key, heads), _keys(call, value, heads)),
            (_queries(call, output, heads), _queries(call, logsumexp, heads)),
            call.bias(query.dtype),
            causal=call.causal,
            scale=self.scale,
        )
        of_keys, of_values = (_rows(call, _sum_heads(call, one, heads)) for one in found[1:])
        return _rows(call, found[0]), of_keys, of_values


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
