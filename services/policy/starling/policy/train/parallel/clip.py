"""Euclidean norm of a gradient whose parts lie on different axes of a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from starling.policy.train.optim.norm import total_norm
from starling.policy.train.parallel.mesh import Mesh


def gradient_norm(gradients: Sequence[tuple[Tensor, tuple[str, ...]]], mesh: Mesh, device: torch.device) -> Tensor:
    """Return the norm of the whole gradient, float32 [], the same on every rank.

    Squares are summed over the axes that shard a tensor, and not over those that repeat it: one sum per axis for all
    tensors together, and then one over the stages of a pipeline.

    Args:
        gradients: this rank's part of each parameter's, and the axes that shard it.
        mesh: of the ranks.
        device: of the result.
    """
    squares: dict[tuple[str, ...], Tensor] = {}
    for axes, parts in _by_axes(gradients).items():
        squares[axes] = total_norm(parts).to(device, torch.float64).square()
    total = torch.zeros((), dtype=torch.float64, device=device)
    # Every rank takes part in every sum, also one whose shards of these tensors are empty.
    kinds = sorted(squares)
    values = torch.stack([squares[kind] for kind in kinds]) if kinds else total.new_zeros(0)
    for axis in sorted({axis for kind in kinds for axis in kind}):
        chosen = torch.tensor([index for index, kind in enumerate(kinds) if axis in kind], device=device)
        summed = values[chosen]
        dist.all_reduce(summed, group=mesh.group(axis))
        values[chosen] = summed
    total += values.sum()
    if mesh.size("pp") > 1:
        dist.all_reduce(total, group=mesh.group("pp"))
    return total.sqrt().float()


def _by_axes(gradients: Sequence[tuple[Tensor, tuple[str, ...]]]) -> Mapping[tuple[str, ...], list[Tensor]]:
    found: dict[tuple[str, ...], list[Tensor]] = {}
    for gradient, axes in gradients:
        found.setdefault(axes, []).append(gradient)
    return found
