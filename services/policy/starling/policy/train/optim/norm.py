"""Euclidean norm of a gradient, which is finite wherever the gradient is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of all `gradients` together, [], in their type, or in float64 where that cannot hold the squares.

    Rewards and ratios of a group may be so large that the squares of its gradient are not finite. The gradient is
    clipped by its norm then, as any other: else a replica that sends such a group could keep a step from being made.
    """
    norm: Tensor = torch.nn.utils.get_total_norm(gradients)
    if bool(norm.isfinite()):
        return norm
    parts = [torch.linalg.vector_norm(one, dtype=torch.float64).to(norm.device) for one in gradients]
    exact: Tensor = torch.linalg.vector_norm(torch.stack(parts))
    return exact
