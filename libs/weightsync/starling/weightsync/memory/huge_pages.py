"""Shared memory in huge pages, which another process reads through the kernel twice as fast.

The kernel looks up every page of memory that it copies from another process (CMA), and for pages of 4 KiB that takes
longer than the copy. Most systems give shared memory huge pages only on request, page by page, and only if the mapping
is aligned to the size of a huge page.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from starling.weightsync.memory.arrays import Memory

HUGE_BYTES: Final = 2 << 20
CHUNK_BYTES: Final = 32 << 20
"""Bytes collapsed per call: some tens of milliseconds."""
_MAP_FIXED, _MAP_NORESERVE, _MADV_COLLAPSE = 0x10, 0x4000, 25
_FAILED: Final = ctypes.c_void_p(-1).value

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class _Mapped:
    """A mapping that lives as long as the last array over it."""

    def __init__(self, address: int, size_bytes: int, *, writable: bool) -> None:
        self._address, self._size_bytes = address, size_bytes
        self._unmap = _libc.munmap
        self.__array_interface__: dict[str, Any] = {
            "data": (address, not writable),
            "shape": (size_bytes,),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self) -> None:
        self._unmap(self._address, self._size_bytes)


def map_shared(descriptor: int, size_bytes: int, *, writable: bool) -> Memory:
    """Map a memory file at an address that is aligned for huge pages; elsewhere it would be mapped in small pages.

    A `writable` mapping is populated at once, a read-only one on first access.

    Raises:
        OSError: it cannot be mapped.
    """
    reserved = _map(None, size_bytes + HUGE_BYTES, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
    address = -(-reserved // HUGE_BYTES) * HUGE_BYTES
    end, reserved_end = address + _paged(size_bytes), reserved + size_bytes + HUGE_BYTES
    if address > reserved:
        _libc.munmap(reserved, address - reserved)
    if reserved_end > end:
        _libc.munmap(end, _paged(reserved_end) - end)
    flags = mmap.MAP_SHARED | _MAP_FIXED | (mmap.MAP_POPULATE if writable else 0)
    _map(address, size_bytes, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0), flags, descriptor)
    return np.asarray(_Mapped(address, size_bytes, writable=writable))


def collapse(memory: Memory, stopped: Callable[[], bool]) -> int:
    """Collapse memory of `map_shared` into huge pages, and return how many bytes the kernel collapsed.

    The memory may be in use meanwhile. A kernel that cannot (before 6.1, or without free huge pages) changes nothing.

    Args:
        memory: a whole mapping.
        stopped: checked before each `CHUNK_BYTES`; True ends it.
    """
    address, done = memory.ctypes.data, 0
    for begin in range(0, memory.nbytes - HUGE_BYTES + 1, CHUNK_BYTES):
        size = min(CHUNK_BYTES, (memory.nbytes - begin) // HUGE_BYTES * HUGE_BYTES)
        if stopped() or _libc.madvise(address + begin, size, _MADV_COLLAPSE) != 0:
            return done
        done += size
    return done


def _map(address: int | None, size_bytes: int, protection: int, flags: int, descriptor: int) -> int:
    mapped: int = _libc.mmap(address, size_bytes, protection, flags, descriptor, 0)
    if mapped == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, "memory cannot be mapped")
    return mapped


def _paged(size_bytes: int) -> int:
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
