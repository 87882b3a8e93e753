"""Memory of a device, in which a snapshot waits for its way to the host, or stays; and the implementation for CPUs.

Everything that uses memory of a device does so through `DeviceAllocator`. The one for CPUs is a second allocator with
the rules of a GPU: its memory can be reached only while it is `opened` for operations of the device, and anything else
that touches it ends the process. So a run on CPUs executes the code path of one on GPUs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from contextlib import AbstractContextManager
from typing import Any, Final, Literal, Protocol

import psutil

from starling.common.errors import WeightsError
from starling.weightsync.memory.arrays import Memory
from starling.weightsync.memory.device_handles import DeviceHandle
from starling.weightsync.memory.protected_pages import ProtectedMemory, SharedPages

SnapshotPlace = Literal["device", "pinned", "host"]
SnapshotPolicy = Literal["auto", "device", "pinned", "host"]
"""Where a snapshot is copied while training waits: `device`, into memory of the device, from where it moves to the host
while training goes on, and where it stays if its transport reads from there; `pinned`, into page-locked memory of the
host; `host`, into any memory of the host. `auto`: `host` for tensors of a CPU; else `device`, where nothing stays,
while there is room for it, and `pinned` while there is none."""

ROOM: Final = 4
"""How many snapshots must fit into the free memory of a device before `auto` puts one there: the rest is for training,
whose activations may be freed at the time of a publication."""
_libc: Final = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.mlock, _libc.munlock):
    _call.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class DeviceMemory(Protocol):
    """One allocation on a device. Used by one thread at a time."""

    def opened(self) -> AbstractContextManager[Any]:
        """Yield its bytes for operations of the device: flat memory, or what the device's library has for that.

        What is derived from it may be used in the context only.
        """

    def copy_to(self, host: Memory) -> None:
        """Fill memory of the host with its first bytes, after all operations of the last `opened`; wait for the end.

        Raises:
            WeightsError: the device has failed.
        """

    def free(self) -> None:
        """Give it back to the allocator."""


class SharedDeviceMemory(DeviceMemory, Protocol):
    """Memory of a device that other processes can open."""

    @property
    def handle(self) -> DeviceHandle:
        """What they open it by."""

    def reading(self) -> AbstractContextManager[Any]:
        """Yield its bytes as `opened` does, to be read only. Thread-safe.

        Raises:
            WeightsError: it was freed.
        """


class DeviceAllocator(Protocol):
    """Memory of one device. Thread-safe."""

    def available_bytes(self) -> int:
        """Return how much could be allocated now."""

    def allocate(self, size_bytes: int) -> DeviceMemory:
        """Return memory of that size.

        Raises:
            WeightsError: there is none.
        """

    def allocate_shared(self, size_bytes: int) -> SharedDeviceMemory:
        """Return memory of that size that other processes can open.

        Raises:
            WeightsError: there is none, or the device has no such memory.
        """

    def pin(self, memory: Memory) -> None:
        """Lock pages of the host into memory, so that the device copies to them at full rate.

        Raises:
            WeightsError: the system does not allow it.
        """

    def unpin(self, memory: Memory) -> None:
        """Undo `pin`; never raises."""


class CpuAllocator:
    """The `DeviceAllocator` of CPUs."""

    def available_bytes(self) -> int:
        """See `DeviceAllocator.available_bytes`."""
        return int(psutil.virtual_memory().available)

    def allocate(self, size_bytes: int) -> ProtectedMemory:
        """See `DeviceAllocator.allocate`."""
        return ProtectedMemory(size_bytes)

    def allocate_shared(self, size_bytes: int) -> SharedPages:
        """See `DeviceAllocator.allocate_shared`."""
        return SharedPages(size_bytes)

    def pin(self, memory: Memory) -> None:
        """See `DeviceAllocator.pin`."""
        if memory.nbytes and _libc.mlock(memory.ctypes.data, memory.nbytes) != 0:
            raise WeightsError(
                f"{memory.nbytes} bytes cannot be locked into memory ({os.strerror(ctypes.get_errno())}): raise the "
                "limit (ulimit -l), or choose the snapshot policy 'host'."
            )

    def unpin(self, memory: Memory) -> None:
        """See `DeviceAllocator.unpin`."""
        with contextlib.suppress(ctypes.ArgumentError):
            _libc.munlock(memory.ctypes.data, memory.nbytes)
