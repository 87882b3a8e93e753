"""Collectives that autograd differentiates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def sum_over(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of `values` over the ranks of `group`.

    Every rank computes the same from it: the gradient of a rank's part is that of the sum, and is not summed again.
    """
    summed: Tensor = _Sum.apply(values, group)  # type: ignore[no-untyped-call]
    return summed


def exchange(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send `sent[r]` of the rows to each rank r of `group`, and return the `received[r]` of each, in their order.

    The gradient takes the same way back.
    """
    exchanged: Tensor = _Exchange.apply(rows, list(sent), list(received), group)  # type: ignore[no-untyped-call]
    return exchanged


def gather(values: Tensor, dim: int, group: dist.ProcessGroup, *, divides_next: bool = True) -> Tensor:
    """Return the `values` of all ranks of `group`, one after another along `dim`; they have the same shape.

    Args:
        values: of this rank.
        dim: along which they are gathered.
        group: the ranks.
        divides_next: whether each rank goes on with another part of a computation, and so has a part of the gradient,
            of which all parts are summed. Otherwise each computes the same, and has the whole gradient.
    """
    gathered: Tensor = _Gather.apply(values, dim, group, divides_next)  # type: ignore[no-untyped-call]
    return gathered


def reduce_scatter(values: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part along `dim` of the sum of `values` over the ranks of `group`, which divide that."""
    summed: Tensor = _ReduceScatter.apply(values, dim, group)  # type: ignore[no-untyped-call]
    return summed


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        summed = values.detach().clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes = sent, received, group
        return all_to_all(rows, sent, received, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received, group = ctx.sizes
        return all_to_all(gradient, received, sent, group), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, dim: int, group: dist.ProcessGroup, divides_next: bool) -> Tensor:
        ctx.dim, ctx.group, ctx.divides_next = dim, group, divides_next
        return _gathered(values, dim, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.divides_next:
            return _reduced(gradient, ctx.dim, ctx.group), None, None, None
        return gradient.chunk(ctx.group.size(), dim=ctx.dim)[ctx.group.rank()], None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _reduced(values, dim, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(gradient, ctx.dim, ctx.group), None, None


def _gathered(values: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    found = values.new_empty(group.size(), *values.shape)
    dist.all_gather_single(found.flatten(0, 1), values.contiguous(), group=group)
    return torch.cat(found.unbind(), dim=dim)


def _reduced(values: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    parts = torch.stack(values.chunk(group.size(), dim=dim))
    found = torch.empty_like(parts[0])
    dist.reduce_scatter_single(found, parts.flatten(0, 1), group=group)
    return found


def all_to_all(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Do what `exchange` does, without gradients."""
    found = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), list(received), list(sent), group=group)
    return found
