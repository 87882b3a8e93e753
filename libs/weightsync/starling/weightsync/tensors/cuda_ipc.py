"""CUDA IPC: memory of a GPU that other processes of the machine open by a handle.

Through CUDA's runtime, and not through torch's sharing of storages: that counts one reader for each handle and keeps
the memory until this reader has come, while a snapshot has any number of readers, or none. And the memory is from
CUDA's allocator, not torch's: a handle opens all of an allocation, so each has one of its own, in whole pages of the
device, and shows nothing else of this process. It is opened for reading and writing: CUDA knows no other way.

A process cannot open its own handle; here it gets the memory itself.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import torch

from starling.common.errors import WeightsError
from starling.weightsync.memory.device_handles import CopyBox, DeviceHandle, OpenedMemory
from starling.weightsync.plan.layout import Box, ShardPiece
from starling.weightsync.tensors.views import tensor_part

PAGE_BYTES: Final = 2 << 20
"""Smallest unit of CUDA's allocator that it shares with another process."""
_HANDLE_BYTES: Final = 64
_LAZY_PEER_ACCESS: Final = 1  # cudaIpcMemLazyEnablePeerAccess


class _Handle(ctypes.Structure):
    """``cudaIpcMemHandle_t``."""

    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


_CALLS: Final[dict[str, tuple[Any, ...]]] = {
    "cudaMalloc": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t),
    "cudaFree": (ctypes.c_void_p,),
    "cudaIpcGetMemHandle": (ctypes.POINTER(_Handle), ctypes.c_void_p),
    "cudaIpcOpenMemHandle": (ctypes.POINTER(ctypes.c_void_p), _Handle, ctypes.c_uint),
    "cudaIpcCloseMemHandle": (ctypes.c_void_p,),
}


class _View:
    """Memory of a device at an address, as torch adopts it."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class Allocation:
    """Memory of CUDA's allocator, with its handle.

    Args:
        address: of its first byte.
        size_bytes: what was asked for.
        device: where it is.

    Raises:
        WeightsError: CUDA shares no memory of this device.
    """

    def __init__(self, address: int, size_bytes: int, device: torch.device) -> None:
        self._address, self._device = address, device
        shared = _Handle()
        _call("cudaIpcGetMemHandle", device, ctypes.byref(shared), address)
        self.handle: Final = DeviceHandle(
            kind="cuda", device=uuid_of(device), size_bytes=size_bytes, handle=bytes(shared.reserved)
        )
        self.flat: Final = _flat(address, size_bytes, device)
        _own[self.handle.handle] = self

    def free(self) -> None:
        """Free it. CUDA's driver keeps the pages of a process that has it open."""
        _own.pop(self.handle.handle, None)
        _call("cudaFree", self._device, self._address)


_own: Final[weakref.WeakValueDictionary[bytes, Allocation]] = weakref.WeakValueDictionary()
"""The allocations of this process by their handles."""


def allocate(size_bytes: int, device: torch.device) -> Allocation:
    """Return memory of a device that other processes can open.

    Raises:
        WeightsError: there is none, or CUDA shares no memory of this device.
    """
    address = ctypes.c_void_p()
    rounded = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
    try:
        _call("cudaMalloc", device, ctypes.byref(address), rounded)
    except WeightsError:
        torch.cuda.empty_cache()  # torch may keep what is missing
        _call("cudaMalloc", device, ctypes.byref(address), rounded)
    assert address.value is not None
    try:
        return Allocation(address.value, size_bytes, device)
    except WeightsError:
        _call("cudaFree", device, address)
        raise


def uuid_of(device: torch.device) -> str:
    """Return the UUID of a GPU. Its number is another one in a process that sees other GPUs."""
    found: Any = torch.cuda.get_device_properties(device)
    return f"GPU-{found.uuid}"


def reaches(handle: DeviceHandle, target: torch.Tensor) -> bool:
    """Return whether the GPU of a tensor reads that of a handle: the same, or a peer that this process sees, too."""
    if target.device.type != "cuda":
        return False
    there = _device_of(handle)
    return there is not None and (there == target.device or torch.cuda.can_device_access_peer(target.device, there))


def open_memory(handle: DeviceHandle) -> OpenedMemory:
    """Open memory of another process, or of this one.

    Raises:
        WeightsError: CUDA cannot open it, for example because its process has ended; or it is smaller than its handle
            says, so that reading it would end this process.
    """
    device = _device_of(handle)
    if device is None:
        raise WeightsError(f"This process does not see {handle.device}, on which the memory is.")
    mine = _own.get(handle.handle)
    if mine is not None:
        return _OpenedAllocation(mine.flat, device)
    if len(handle.handle) != _HANDLE_BYTES:
        raise WeightsError(f"A handle of CUDA has {_HANDLE_BYTES} bytes, and not {len(handle.handle)}.")
    address = ctypes.c_void_p()
    shared = _Handle((ctypes.c_ubyte * _HANDLE_BYTES)(*handle.handle))
    _call("cudaIpcOpenMemHandle", device, ctypes.byref(address), shared, _LAZY_PEER_ACCESS)
    assert address.value is not None
    try:
        _check_extent(address.value, handle.size_bytes)
        return _OpenedAllocation(_flat(address.value, handle.size_bytes, device), device, address.value)
    except WeightsError:
        _call("cudaIpcCloseMemHandle", device, address)
        raise


class _OpenedAllocation:
    """The `OpenedMemory` of a CUDA device."""

    def __init__(self, flat: torch.Tensor, device: torch.device, address: int = 0) -> None:
        self._flat: torch.Tensor | None = flat
        self._device, self._address = device, address

    @contextmanager
    def copying(self) -> Iterator[CopyBox]:
        """See `OpenedMemory.copying`. Copies follow what the engine has begun on the current stream of their device."""
        flat, devices = self._flat, set[torch.device]()
        assert flat is not None, "closed memory was read"

        def copy(piece: ShardPiece, offset: int, box: Box, target: torch.Tensor) -> None:
            if box.volume:
                packed = flat[offset : offset + piece.size_bytes].view(getattr(torch, piece.dtype))
                devices.add(target.device)
                target.copy_(tensor_part(packed.view(piece.box.size), piece.box, box), non_blocking=True)

        try:
            with torch.no_grad(), torch.cuda.device(self._device):
                try:
                    yield copy
                finally:  # also after an error: nothing is written later
                    for device in devices | {self._device}:
                        torch.cuda.current_stream(device).synchronize()
        except RuntimeError as error:
            raise WeightsError(f"Weights could not be copied from {self._device}: {error}.") from error

    def close(self) -> None:
        """See `OpenedMemory.close`."""
        self._flat = None
        address, self._address = self._address, 0
        if address:
            _call("cudaIpcCloseMemHandle", self._device, address)


def _flat(address: int, size_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(_View(address, size_bytes), device=device)


def _device_of(handle: DeviceHandle) -> torch.device | None:
    return _visible().get(handle.device)


@cache
def _visible() -> dict[str, torch.device]:
    """Return the GPUs of this process by UUID."""
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return {uuid_of(device): device for device in devices}


def _check_extent(address: int, size_bytes: int) -> None:
    """Raise unless an allocation begins at an address and has so many bytes."""
    base, extent = ctypes.c_void_p(), ctypes.c_size_t()
    query = ctypes.CDLL("libcuda.so.1").cuMemGetAddressRange_v2
    query.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t), ctypes.c_void_p)
    code = query(ctypes.byref(base), ctypes.byref(extent), address)
    if code or base.value != address or extent.value < size_bytes:
        raise WeightsError(f"The opened memory has {extent.value} bytes, expected {size_bytes} (CUDA error {code}).")


def _call(name: str, device: torch.device, *arguments: Any) -> None:
    """Call CUDA's runtime for a device.

    Raises:
        WeightsError: it has failed. Torch finds no error of it later.
    """
    runtime = _runtime()
    with torch.cuda.device(device):
        code = getattr(runtime, name)(*arguments)
        if code:
            runtime.cudaGetLastError()
            raise WeightsError(f"{name} has failed on {device}: {runtime.cudaGetErrorString(code).decode()}.")


@cache
def _runtime() -> ctypes.CDLL:
    """Return the runtime that torch has loaded.

    Raises:
        WeightsError: torch has none.
    """
    major = str(torch.version.cuda).partition(".")[0]
    try:
        runtime = ctypes.CDLL(f"libcudart.so.{major}")
        for name, types in _CALLS.items():
            getattr(runtime, name).argtypes = types
        runtime.cudaGetErrorString.restype = ctypes.c_char_p
    except (OSError, AttributeError) as error:
        raise WeightsError(f"CUDA's runtime cannot be loaded ({error}).") from error
    return runtime
