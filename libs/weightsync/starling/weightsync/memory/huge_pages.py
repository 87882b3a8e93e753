"""Shared memory in huge pages: what another process reads through the kernel, it reads twice as fast.

The kernel looks up every page of memory that it copies from another process (CMA), and for pages of 4 KiB that takes
longer than the copy. Most systems never give shared memory huge pages by themselves, but do on request, page by page,
if the mapping begins where a huge page may.
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
"""So much is asked for at a time: some tens of milliseconds."""
_MAP_FIXED, _MAP_NORESERVE, _MADV_COLLAPSE = 0x10, 0x4000, 25
_FAILED: Final = ctypes.c_void_p(-1).value

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class _Mapped:
    """A mapping that lasts as long as anything looks into it."""

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
    """Map a file of memory at an address where huge pages may begin: a mapping elsewhere sees their small parts only.

    One that is `writable` has every page present; any other meets pages when it reads them.

    Raises:
        OSError: there is no room.
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
    """Ask the kernel to keep memory of `map_shared` in huge pages, and return how many bytes it agreed to.

    The memory may be in use meanwhile. A kernel that cannot (before 6.1, or without free huge pages) changes nothing.

    Args:
        memory: all of it.
        stopped: asked after every few milliseconds; True ends it.
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
