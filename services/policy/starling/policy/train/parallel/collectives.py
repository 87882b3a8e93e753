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


def all_to_all(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Do what `exchange` does, without gradients."""
    found = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), list(received), list(sent), group=group)
    return found
