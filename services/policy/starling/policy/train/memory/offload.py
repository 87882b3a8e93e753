"""Activations that wait for the backward pass in the CPU's memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, MutableMapping
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from starling.policy.train.memory.blocks import class_forward, replace_forward

LEAST_BYTES: Final = 1 << 20
"""Smaller tensors stay: their copies would cost more time than they save memory."""


def offload_activations(
    model: torch.nn.Module, *, least_bytes: int = LEAST_BYTES, away_from: Collection[str] = ("cuda", "xpu")
) -> None:
    """Let what `model` saves for its backward pass lie in pinned memory of the CPU, and come back when it is needed.

    The copies are made in the order of the stream that computes: no synchronisation is needed and the memory that they
    free is at hand for what is computed next, but nothing is computed while they last.

    Args:
        model: changed in place.
        least_bytes: size from which a tensor is moved.
        away_from: types of devices whose tensors are moved.
    """
    kinds = frozenset(away_from)

    def offloading(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _saving_away(self, least_bytes, kinds):
            return class_forward(self, *args, **kwargs)

    replace_forward(model, offloading)


def _saving_away(model: torch.nn.Module, least_bytes: int, away_from: frozenset[str]) -> AbstractContextManager[object]:
    # The backward pass needs the weights too, and they stay where they are.
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    # Several operations save the same tensor, such as the input of three projections: it is moved once.
    moved: MutableMapping[Tensor, tuple[int, Tensor]] = WeakTensorKeyDictionary()

    def pack(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        if (
            tensor.device.type not in away_from
            or tensor.nbytes < least_bytes
            or tensor.untyped_storage()._cdata in weights
        ):
            return tensor
        known = moved.get(tensor)
        if known is None or known[0] != tensor._version:
            copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "cpu")
            known = moved[tensor] = tensor._version, copy.copy_(tensor, non_blocking=True)
        return tensor.device, known[1]

    def unpack(packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, copy = packed
        return copy.to(device, non_blocking=True)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


# JOINED from starling.policy.train.parking: A policy that gives its devices to others for a while: its
# tensors lie in the CPU's memory meanwhile.  Each tensor stays the object that it is, and every view of it:
# only the memory behind it goes, and comes back.

AWAY_FROM: Final = ("cuda", "xpu")
"""Types of devices that are given away; what is in the CPU's memory already stays there."""


class DeviceOffload:
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
