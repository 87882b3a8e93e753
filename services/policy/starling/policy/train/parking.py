"""A policy that gives its devices to others for a while: its tensors lie in the CPU's memory meanwhile.

Each tensor stays the object that it is, and every view of it: only the memory behind it goes, and comes back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

import torch
from torch import Tensor

AWAY_FROM: Final = ("cuda", "xpu")
"""Types of devices that are given away; what is in the CPU's memory already stays there."""


class Parking:
    """Where the tensors are that were taken off their devices."""

    def __init__(self, away_from: Collection[str] = AWAY_FROM) -> None:
        """`away_from`: types of devices whose tensors are moved."""
        self._away_from = frozenset(away_from)
        self._parked: list[tuple[torch.UntypedStorage, Tensor]] = []
        self.is_parked = False
        """The tensors have no memory on their devices."""

    def park(self, tensors: Iterable[Tensor]) -> int:
        """Take these tensors off their devices, and return how many bytes that frees; 0 when it was done before."""
        if self.is_parked:
            return 0
        self.is_parked = True
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
            for tensor in tensors
            if tensor.device.type in self._away_from and tensor.untyped_storage().nbytes()
        }
        for storage in storages.values():
            on_device = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type != "cpu")
            self._parked.append((storage, copy.copy_(on_device)))
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # else the freed memory stays with this process
        return sum(copy.nbytes for _, copy in self._parked)

    def bring_back(self) -> None:
        """Put every tensor back to where it was, bit for bit."""
        while self._parked:
            storage, copy = self._parked[-1]
            storage.resize_(copy.nbytes)
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(copy)
            self._parked.pop()  # only now: where the device has no room, what is left can be brought back later
        self.is_parked = False
