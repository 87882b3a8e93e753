"""Noise of trajectories: it depends on the seed, the trajectory and the step, and on nothing else in the batch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

INITIAL: Final = -1
"""In place of a step: the noise that a trajectory begins with."""


def noise_seed(seed: int, index: int, step: int) -> int:
    """Return the seed of one step's noise: 63 bits of a digest, so that no two steps of a run share one by a sum."""
    digest = hashlib.blake2b(f"{seed}/{index}/{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def normal(seed: int, index: int, step: int, shape: Sequence[int]) -> Tensor:
    """Return standard normal noise of `shape`, float32, drawn on the CPU: the same on every device.

    Args:
        seed: of the group.
        index: of the trajectory in its group.
        step: its step, or `INITIAL`.
        shape: without a batch axis.
    """
    generator = torch.Generator().manual_seed(noise_seed(seed, index, step))
    return torch.randn(tuple(shape), generator=generator)
