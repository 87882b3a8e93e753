"""Device memory of a CPU: pages with the rules of a GPU, of this process or shared with others.

They have no access right while they are not opened for operations of the device: anything else that touches them ends
the process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from starling.common.errors import WeightsError
from starling.weightsync.memory.arrays import Memory, part_of
from starling.weightsync.memory.device_handles import CopyBox, DeviceHandle
from starling.weightsync.memory.memory_files import address_of, create_file, open_file, seal
from starling.weightsync.plan.layout import CPU, ITEM_BYTES, Box, ShardPiece

_NONE, _READ, _WRITE = 0, 1, 2  # PROT_NONE, PROT_READ, PROT_WRITE
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class ProtectedMemory:
    """A `DeviceMemory` of a CPU: pages of their own, without any access right while they are not opened.

    It may be opened by several threads at once.
    """

    rights = _READ | _WRITE
    """Of pages that are opened."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._lock, self._num_open = threading.Lock(), 0
        try:
            self._pages: mmap.mmap | None = self._map(max(1, size_bytes))
        except OSError as error:
            raise WeightsError(f"No {size_bytes} bytes of memory: {error.strerror}.") from error
        self._protect(_NONE)

    @contextmanager
    def opened(self) -> Iterator[Memory]:
        """See `DeviceMemory.opened`."""
        assert self._pages is not None, "freed memory was opened"
        with self._lock:
            self._num_open += 1
            if self._num_open == 1:
                self._protect(self.rights)
        try:
            yield np.frombuffer(self._pages, np.uint8, self._size_bytes)
        finally:
            with self._lock:
                self._num_open -= 1
                if not self._num_open:
                    self._protect(_NONE)

    def copy_to(self, host: Memory) -> None:
        """See `DeviceMemory.copy_to`."""
        with self.opened() as memory:
            np.copyto(host, memory[: host.nbytes])

    def free(self) -> None:
        """See `DeviceMemory.free`. The pages are unmapped when the last view of them is gone."""
        self._pages = None

    def _map(self, size_bytes: int) -> mmap.mmap:
        """Return pages of that size. Raises OSError."""
        return mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def _protect(self, rights: int) -> None:
        if self._pages is None:  # freed while it was open: unmapped with the last view
            return
        flat = np.frombuffer(self._pages, np.uint8)
        if _libc.mprotect(flat.ctypes.data, flat.nbytes, rights) != 0:
            raise WeightsError(f"The rights of memory cannot be changed: {os.strerror(ctypes.get_errno())}.")


class SharedPages(ProtectedMemory):
    """A `SharedDeviceMemory` of a CPU: a memory file, which other processes open by its address."""

    def __init__(self, size_bytes: int) -> None:
        self._file = -1
        super().__init__(size_bytes)
        self.handle: Final = DeviceHandle(
            kind="cpu", device=CPU, size_bytes=max(1, size_bytes), handle=_named(address_of(self._file), self._file)
        )

    @contextmanager
    def reading(self) -> Iterator[Memory]:
        """See `SharedDeviceMemory.reading`."""
        if self._pages is None:
            raise WeightsError("The memory of the snapshot was freed.")
        with self.opened() as flat:
            yield flat

    def free(self) -> None:
        """See `DeviceMemory.free`. A process that has opened it keeps it until it closes it."""
        super().free()
        descriptor, self._file = self._file, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _map(self, size_bytes: int) -> mmap.mmap:
        self._file = create_file("starling-device", size_bytes)
        try:
            pages = mmap.mmap(self._file, size_bytes, mmap.MAP_SHARED)
            seal(self._file)
        except OSError:
            os.close(self._file)
            raise
        return pages


class OpenedPages(ProtectedMemory):
    """The `OpenedMemory` of a CPU.

    Raises:
        WeightsError: it cannot be opened, or is smaller than its handle says.
    """

    rights = _READ

    def __init__(self, handle: DeviceHandle) -> None:
        self._handle = handle
        super().__init__(handle.size_bytes)

    @contextmanager
    def copying(self) -> Iterator[CopyBox]:
        """See `OpenedMemory.copying`."""
        with self.opened() as flat:

            def copy(piece: ShardPiece, offset: int, box: Box, target: Any) -> None:
                if box.volume:
                    whole = np.ndarray(piece.box.size, f"u{ITEM_BYTES[piece.dtype]}", flat, offset)
                    np.copyto(target, part_of(whole, piece.box, box))

            yield copy

    def close(self) -> None:
        """See `OpenedMemory.close`."""
        self.free()

    def _map(self, size_bytes: int) -> mmap.mmap:
        address = self._handle.handle.decode("ascii", "replace").partition(" ")[0]
        descriptor, _ = open_file(address, "device memory", size_bytes)
        try:
            if _named(address, descriptor) != self._handle.handle:
                raise WeightsError(f"{address} is not the device memory that was there: it was freed.")
            return mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(descriptor)


def _named(address: str, descriptor: int) -> bytes:
    """Return a handle: an address, and the number of the file, since the address of a closed one is given to others."""
    return f"{address} {os.fstat(descriptor).st_ino}".encode()
