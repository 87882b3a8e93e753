"""Parts of tensors that ranks hold: what states and exports are made of, whatever the mesh."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from starling.weightsync.layouts.placements import Held
from starling.weightsync.plan.layout import Box


@dataclass(frozen=True, eq=False)
class Part:
    """The boxes of one tensor that this rank holds."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    held: tuple[Held, ...]
    """The boxes, and where each begins in `local`."""
    local: Tensor

    @classmethod
    def whole(cls, tensor: Tensor) -> Part:
        """Return all of a tensor."""
        shape = tuple(tensor.shape)
        start = (0,) * len(shape)
        return cls(shape, (Held(box=Box(offset=start, size=shape), origin=start),), tensor)

    def moved(self, local: Tensor) -> Part:
        """Return the same part in other memory."""
        return Part(self.shape, self.held, local)

    def boxes(self) -> dict[tuple[int, ...], Tensor]:
        """Return a view of each box, by the index of its first element in the whole tensor."""
        found = {}
        for held in self.held:
            view = self.local
            for dim, (start, size) in enumerate(zip(held.origin, held.box.size, strict=True)):
                view = view.narrow(dim, start, size)
            found[held.box.offset] = view
        return found
