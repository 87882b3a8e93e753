"""Offload of device tensors to host memory: activations until the backward pass, and a whole policy while it sleeps."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from starling.policy.train.memory.blocks import class_forward, replace_forward

DEVICE_TYPES: Final = ("cuda", "xpu")
"""Types of devices whose tensors are offloaded."""
MIN_ACTIVATION_BYTES: Final = 1 << 20
"""Smaller activations stay: their copies would cost more time than they save memory."""


def offload_activations(
    model: torch.nn.Module,
    *,
    min_bytes: int = MIN_ACTIVATION_BYTES,
    device_types: Collection[str] = DEVICE_TYPES,
) -> None:
    """Keep the tensors that `model` saves for its backward pass in pinned host memory.

    The copies are made in the order of the stream that computes: no synchronisation is needed, and the memory that they
    free can be used by the next computation, but nothing is computed while they last.

    Args:
        model: changed in place.
        min_bytes: size from which a tensor is moved.
        device_types: types of devices whose tensors are moved.
    """
    types = frozenset(device_types)

    def offloading(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _offload_saved_tensors(self, min_bytes, types):
            return class_forward(self, *args, **kwargs)

    replace_forward(model, offloading)


def _offload_saved_tensors(
    model: torch.nn.Module, min_bytes: int, device_types: frozenset[str]
) -> AbstractContextManager[object]:
    # The backward pass needs the weights too, and they stay on the device.
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    # Several operations save the same memory, such as the input of three projections, or views of it: it is moved once.
    moved: WeakValueDictionary[tuple[int, int, torch.dtype], Tensor] = WeakValueDictionary()
    storages = dict[int, StorageWeakRef]()
    """Of what was moved: while there is a reference, no other storage gets the same address."""

    def pack(tensor: Tensor) -> Tensor | _Moved:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if tensor.device.type not in device_types or tensor.nbytes < min_bytes or address in weights:
            return tensor
        is_whole = is_whole_storage(tensor)
        flat = tensor.as_strided((tensor.numel(),), (1,), 0) if is_whole else tensor
        key = address, tensor._version, tensor.dtype
        copy = moved.get(key) if is_whole else None
        if copy is None:
            copy = torch.empty_like(flat, device="cpu", pin_memory=tensor.device.type != "cpu")
            copy.copy_(flat, non_blocking=True)
        if is_whole:
            moved[key] = copy
            storages[address] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return _Moved(tensor.device, copy, (tensor.size(), tensor.stride()) if is_whole else None)

    def unpack(packed: Tensor | _Moved) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        found = packed.copy.to(packed.device, non_blocking=True)
        return found if packed.form is None else found.as_strided(*packed.form)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def is_whole_storage(tensor: Tensor) -> bool:
    """Whether `tensor` has as many elements as its memory, so that a copy of that can replace it, in any order."""
    return tensor.nbytes == tensor.untyped_storage().nbytes() and not tensor.storage_offset()


class _Moved(NamedTuple):
    """A saved tensor in host memory."""

    device: torch.device
    copy: Tensor
    form: tuple[torch.Size, tuple[int, ...]] | None
    """Its size and strides, where the copy is of its whole storage."""


class DeviceOffload:
    """Tensors of a sleeping policy in host memory.

    Each tensor and every view of it stays the same object: only its memory on the device is released and restored.
    """

    def __init__(self, device_types: Collection[str] = DEVICE_TYPES) -> None:
        """`device_types`: types of devices whose tensors are moved."""
        self._device_types = frozenset(device_types)
        self._copies: list[tuple[torch.UntypedStorage, Tensor]] = []
        self.is_offloaded = False
        """The tensors have no memory on their devices."""

    def offload(self, tensors: Iterable[Tensor]) -> int:
        """Move `tensors` to host memory. Returns the bytes freed on devices; 0 if they are offloaded already."""
        if self.is_offloaded:
            return 0
        self.is_offloaded = True
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
            for tensor in tensors
            if tensor.device.type in self._device_types and tensor.untyped_storage().nbytes()
        }
        for storage in storages.values():
            on_device = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type != "cpu")
            self._copies.append((storage, copy.copy_(on_device)))
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # else the freed memory stays with this process
        return sum(copy.nbytes for _, copy in self._copies)

    def restore(self) -> None:
        """Move every tensor back to its device, bit for bit."""
        while self._copies:
            storage, copy = self._copies[-1]
            storage.resize_(copy.nbytes)
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(copy)
            self._copies.pop()  # only now: if the device is out of memory, the rest can be restored later
        self.is_offloaded = False
