"""Merged attention: the parts of a forest, computed one call after another, and merged by log-sum-exp.

A query's attention to two sets of keys, with outputs o1, o2 and log-sum-exps l1, l2, merges exactly into that to both:

    l = log(exp(l1) + exp(l2)),   o = o1 exp(l1 - l) + o2 exp(l2 - l)

as in ring attention (Liu et al., arXiv:2310.01889). The backward pass calls each kernel's own with the merged o and l,
which gives the gradients of the merged attention; they add up over the parts. A sink is one more key of each query,
with a learnt score and a value of zero (arXiv:2309.17453): it merges in the same way.

Legend of shapes: T tokens, H query heads, G key heads, D head dimension; each key head serves H / G query heads.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from starling.algo.attention.kernels import Inputs, Outputs

Levels = tuple[tuple["Call", ...], ...]
"""The calls of each level of a forest's parts; see `Forest.levels`."""


class Call(Protocol):
    """A kernel call on some rows of queries and some of keys.

    Rows are given by their numbers, or read in place, from the first one on, where these are None.
    """

    @property
    def query(self) -> int:
        """First row of queries that are read in place."""

    @property
    def num_queries(self) -> int:
        """Queries of each part."""

    @property
    def key(self) -> int:
        """First row of keys that are read in place."""

    @property
    def queries(self) -> Tensor | None:
        """int64: the rows of the queries, padding included."""

    @property
    def keys(self) -> Tensor | None:
        """int64: the rows of the keys."""

    @property
    def targets(self) -> Tensor | None:
        """int64: `queries` with the number of rows in place of padding."""


class Runner(Protocol):
    """Computes calls of one kind with a kernel."""

    def forward(self, call: Any, inputs: Inputs) -> Outputs:
        """Return output [Q, H, D] and log-sum-exp [Q, H] of the call's queries, padding included.

        Args:
            call: of the computation.
            inputs: query [T, H, D], key and value [T, G, D] of the row.
        """

    def backward(self, call: Any, gradient: Tensor, inputs: Inputs, outputs: Outputs) -> Inputs:
        """Return the gradients of the call's queries [Q, H, D], keys and values [K, G, D].

        Args:
            call: of the computation.
            gradient: of the row's output, [T, H, D].
            inputs: as in the forward pass.
            outputs: of the row, merged over all calls: [T, H, D] and [T, H].
        """


def merged_attention(inputs: Inputs, levels: Levels, runner: Runner, sinks: Tensor | None) -> Tensor:
    """Return the attention of a packed row, [T, H, D].

    Args:
        inputs: query [T, H, D], key and value [T, G, D], of one type.
        levels: the calls.
        runner: of these calls.
        sinks: score of each query head's sink, [H]; None for none.
    """
    output: Tensor = _MergedAttention.apply(*inputs, levels, runner, sinks)  # type: ignore[no-untyped-call]
    return output


class _MergedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, levels: Levels, runner: Runner, sinks: Tensor | None
    ) -> Tensor:
        inputs = query, key, value
        merged = Merged(query, is_merged=len(levels) > 1)
        for number, calls in enumerate(levels):
            for call in calls:
                own = runner.forward(call, inputs)
                if number == 0:
                    merged.write(call, *own)
                else:
                    merged.add(call, *own)
        if sinks is not None:
            merged.add_sinks(sinks)
        result = merged.output[: len(query)].to(query.dtype)
        ctx.levels, ctx.runner = levels, runner
        ctx.save_for_backward(query, key, value, result, merged.logsumexp, sinks)
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, logsumexp, sinks = ctx.saved_tensors
        inputs, outputs = (query, key, value), (output, logsumexp)
        sums = [GradientSum(one, is_merged=len(ctx.levels) > 1) for one in inputs]
        for number, calls in enumerate(ctx.levels):
            for call in calls:
                found = ctx.runner.backward(call, gradient, inputs, outputs)
                sums[0].add(call.query, call.queries, call.targets, found[0], first=number == 0)
                for total, own in zip(sums[1:], found[1:], strict=True):
                    total.add(call.key, call.keys, call.targets, own, first=number == 0)
        of_sinks = None
        if sinks is not None and ctx.needs_input_grad[5]:
            of_sinks = sink_gradient(gradient, sinks, outputs)
        return *(total.total(query.dtype) for total in sums), None, None, of_sinks


def sink_gradient(gradient: Tensor, sinks: Tensor, outputs: Outputs) -> Tensor:
    """Return the gradient of `sinks`, [H], from that of the output, [T, H, D]."""
    output, logsumexp = outputs
    weights = (sinks.to(logsumexp.dtype) - logsumexp[: len(output)]).exp_()
    return -(weights * (gradient * output).sum(-1)).sum(0).to(sinks.dtype)


class Merged:
    """Output and log-sum-exp of the calls so far; one more row, which takes the padding of batched calls."""

    def __init__(self, query: Tensor, *, is_merged: bool) -> None:
        shape = len(query) + 1, *query.shape[1:]
        wide = torch.promote_types(query.dtype, torch.float32)
        self.output = query.new_empty(shape, dtype=wide if is_merged else query.dtype)
        self.logsumexp = query.new_empty(shape[:2], dtype=wide)

    @classmethod
    def empty(cls, query: Tensor) -> Merged:
        """Return the attention of `query`, [Q, H, D], to no keys."""
        merged = cls(query, is_merged=True)
        merged.output.zero_()
        merged.logsumexp.fill_(-torch.inf)
        return merged

    def write(self, call: Call, output: Tensor, logsumexp: Tensor) -> None:
        """Set the rows of the call's queries."""
        for total, own in ((self.output, output), (self.logsumexp, logsumexp)):
            if call.targets is None:
                total[call.query : call.query + call.num_queries] = own
            else:
                total.index_copy_(0, call.targets, own.to(total.dtype))

    def add(self, call: Call, output: Tensor, logsumexp: Tensor) -> None:
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

    def add_sinks(self, sinks: Tensor) -> None:
        """Merge a key with the score of each head's sink, and a value of zero, into all rows."""
        both = torch.logaddexp(self.logsumexp, sinks.to(self.logsumexp.dtype))
        self.output.mul_((self.logsumexp - both).exp_()[:, :, None])
        self.logsumexp = both


class GradientSum:
    """Gradient of one input, summed over the calls."""

    def __init__(self, like: Tensor, *, is_merged: bool) -> None:
        wide = torch.promote_types(like.dtype, torch.float32) if is_merged else like.dtype
        self._sum = like.new_empty((len(like) + 1, *like.shape[1:]), dtype=wide)

    @classmethod
    def empty(cls, like: Tensor) -> GradientSum:
        """Return a gradient of 0, in at least single precision."""
        found = cls(like, is_merged=True)
        found._sum.zero_()
        return found

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

    def total(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the sum; None for the type in which it was made."""
        return self._sum[:-1].to(dtype or self._sum.dtype)
