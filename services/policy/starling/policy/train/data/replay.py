"""Experts that a microbatch replays: for each of its slots, those that the rollout's routers chose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from starling.algo.routing import Experts, unrecorded

UNRECORDED = -1
"""In place of an expert, for slots whose experts the model's own routers choose."""


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """The experts of M layers, K of each slot."""

    experts: Tensor
    """int16 [slots, M, K]: those of this rank's slots, where ranks divide them; `UNRECORDED` in empty ones, too."""
    differing: dict[int, Tensor] = field(default_factory=dict)
    """Number of replayed experts that the model's own routers would not have chosen, by layer: of the layers that have
    been computed since the last `take_counts`."""

    @classmethod
    def of(cls, experts: Experts, device: torch.device | str) -> Replay:
        """Return the replay of recorded `experts`, whose ids have at most 15 bits."""
        none = experts == unrecorded(experts.dtype)
        return cls(torch.from_numpy(np.where(none, np.int16(UNRECORDED), experts.astype(np.int16))).to(device))

    def divided(self, take: Callable[[Tensor], Tensor], missing: int) -> Replay:
        """Return the replay of some slots.

        Args:
            take: returns the elements of some slots, [..., l], from those of all, [..., L].
            missing: empty slots at the end, besides those of this replay.
        """
        by_slot = torch.nn.functional.pad(self.experts.permute(1, 2, 0), (0, missing), value=UNRECORDED)
        return Replay(take(by_slot).permute(2, 0, 1).contiguous())

    @property
    def uncounted(self) -> Replay:
        """The same experts, for a pass that computes a block again."""
        return Replay(self.experts)

    def take_counts(self) -> Tensor:
        """Return the recorded experts that the model's own routers would not have chosen, and all: int64 [2].

        Those of the layers that have been computed since the last call.
        """
        recorded = (self.experts[:, 0] != UNRECORDED).sum()
        if not self.differing:
            return recorded.new_zeros(2)
        differing = torch.stack([*self.differing.values()])
        self.differing.clear()
        return torch.stack([differing.sum(), recorded * len(differing)])
