"""Memory of a device, in which a snapshot waits for its way to the host; and the implementation for CPUs.

Everything that uses memory of a device does so through `DeviceAllocator`. The one for CPUs is a second allocator with
the rules of a GPU: its memory can be reached only while it is `opened` for operations of the device, and anything else
that touches it ends the process. So a run on CPUs executes the code path of one on GPUs.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Literal, Protocol

import numpy as np
import psutil

from starling.common.errors import WeightsError
from starling.weightsync.memory.arrays import Memory

SnapshotPlace = Literal["device", "pinned", "host"]
SnapshotPolicy = Literal["auto", "device", "pinned", "host"]
"""Where a snapshot is copied while training waits: `device`, into memory of the device, from where it moves to the host
while training goes on; `pinned`, into page-locked memory of the host; `host`, into any memory of the host. `auto`:
`host` for tensors of a CPU; else `device` while there is room for it, and `pinned` while there is none."""

ROOM: Final = 4
"""How many snapshots must fit into the free memory of a device before `auto` puts one there: the rest is for training,
whose activations may be freed at the time of a publication."""
_NONE, _READ, _WRITE = 0, 1, 2  # PROT_NONE, PROT_READ, PROT_WRITE
_libc: Final = ctypes.CDLL(None, use_errno=True)
for _call, _arguments in (
    (_libc.mprotect, (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)),
    (_libc.mlock, (ctypes.c_void_p, ctypes.c_size_t)),
    (_libc.munlock, (ctypes.c_void_p, ctypes.c_size_t)),
):
    _call.argtypes = _arguments


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


class DeviceAllocator(Protocol):
    """Memory of one device. Thread-safe."""

    def available_bytes(self) -> int:
        """Return how much could be allocated now."""

    def allocate(self, size_bytes: int) -> DeviceMemory:
        """Return memory of that size.

        Raises:
            WeightsError: there is none.
        """

    def pin(self, memory: Memory) -> None:
        """Lock pages of the host into memory, so that the device copies to them at full rate.

        Raises:
            WeightsError: the system does not allow it.
        """

    def unpin(self, memory: Memory) -> None:
        """Undo `pin`; never raises."""


class ProtectedMemory:
    """A `DeviceMemory` of a CPU: pages of their own, without any access right while they are not opened."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        try:
            self._pages: mmap.mmap | None = mmap.mmap(-1, max(1, size_bytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise WeightsError(f"No {size_bytes} bytes of memory: {error.strerror}.") from error
        self._protect(_NONE)

    @contextmanager
    def opened(self) -> Iterator[Memory]:
        """See `DeviceMemory.opened`."""
        assert self._pages is not None, "freed memory was opened"
        self._protect(_READ | _WRITE)
        try:
            yield np.frombuffer(self._pages, np.uint8, self._size_bytes)
        finally:
            self._protect(_NONE)

    def copy_to(self, host: Memory) -> None:
        """See `DeviceMemory.copy_to`."""
        with self.opened() as memory:
            np.copyto(host, memory[: host.nbytes])

    def free(self) -> None:
        """See `DeviceMemory.free`. The pages are unmapped when the last view of them is gone."""
        self._pages = None

    def _protect(self, rights: int) -> None:
        flat = np.frombuffer(self._pages, np.uint8)  # type: ignore[arg-type]
        if _libc.mprotect(flat.ctypes.data, flat.nbytes, rights) != 0:
            raise WeightsError(f"The rights of memory cannot be changed: {os.strerror(ctypes.get_errno())}.")


class CpuAllocator:
    """The `DeviceAllocator` of CPUs."""

    def available_bytes(self) -> int:
        """See `DeviceAllocator.available_bytes`."""
        return int(psutil.virtual_memory().available)

    def allocate(self, size_bytes: int) -> ProtectedMemory:
        """See `DeviceAllocator.allocate`."""
        return ProtectedMemory(size_bytes)

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
