"""Buffer pools for payloads in transit: memory is allocated when first needed, and reused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from starling.weightsync.memory.arrays import Memory, allocate
from starling.weightsync.plan.layout import aligned

_CHECK_S: Final = 0.05
"""How often a thread that waits for a block checks whether it still has to."""


class BufferPool:
    """Blocks of one contiguous buffer, first fit; the buffer is allocated with the first block. Used by one thread."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        """Size of the buffer."""
        self._memory = allocate(0)
        self._free: list[tuple[int, int]] = []
        self.clear()

    @property
    def memory(self) -> Memory:
        """The whole buffer."""
        if not self._memory.nbytes and self.size_bytes:
            self._memory = allocate(self.size_bytes)
        return self._memory

    def clear(self) -> None:
        """Mark every block as free; none may be used afterwards."""
        self._free = [(0, self.size_bytes)] if self.size_bytes else []

    def acquire(self, size_bytes: int) -> Memory | None:
        """Return a block, or None when no free range is large enough now. Raises WeightsError when the buffer cannot
        be allocated."""
        size = aligned(size_bytes)
        for index, (begin, length) in enumerate(self._free):
            if length >= size:
                memory = self.memory  # before the block is marked as used: the allocation may fail
                self._free[index : index + 1] = [(begin + size, length - size)] if length > size else []
                return memory[begin : begin + size]
        return self._memory[:0] if size == 0 else None

    def release(self, block: Memory) -> None:
        """Give a block back."""
        if not block.nbytes:
            return
        begin = block.ctypes.data - self._memory.ctypes.data
        assert 0 <= begin < self.size_bytes, "a block of other memory was released"
        merged: list[tuple[int, int]] = []
        for start, length in sorted([*self._free, (begin, block.nbytes)]):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._free = merged


class GrowingBufferPool:
    """Blocks of any sizes, reused after release: `limit_bytes` in all, or a single larger one. Used by one thread.

    There are never more blocks than were once in use at one time: a new block replaces free ones, which are all too
    small by then.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._free: list[Memory] = []
        self._used_bytes = 0

    def acquire(self, size_bytes: int) -> Memory | None:
        """Return a block of at least that size, or None when the limit is reached now.

        Raises:
            WeightsError: it cannot be allocated.
        """
        if not size_bytes:
            return allocate(0)
        fitting = [index for index, block in enumerate(self._free) if block.nbytes >= size_bytes]
        if fitting:
            block = self._free.pop(min(fitting, key=lambda index: self._free[index].nbytes))
            self._used_bytes += block.nbytes
            return block
        if self._used_bytes and self._used_bytes + size_bytes > self._limit_bytes:
            return None
        left = self._limit_bytes - self._used_bytes - size_bytes
        freed = 0
        while self._free and (freed < size_bytes or self.free_bytes > left):
            freed += self._free.pop(0).nbytes
        block = allocate(size_bytes)  # before it is counted as used: the allocation may fail
        self._used_bytes += size_bytes
        return block

    @property
    def free_bytes(self) -> int:
        """Size of the blocks that were released and can be reused."""
        return sum(block.nbytes for block in self._free)

    def release(self, block: Memory) -> None:
        """Give a block back."""
        self._used_bytes -= block.nbytes
        if block.nbytes:
            self._free.append(block)


class SharedBufferPool:
    """A `GrowingBufferPool` of several threads, each of which waits until there is a block for it."""

    def __init__(self, limit_bytes: int) -> None:
        self._pool = GrowingBufferPool(limit_bytes)
        self._released = threading.Condition()

    @contextmanager
    def block(self, size_bytes: int, cancelled: Callable[[], bool]) -> Iterator[Memory | None]:
        """Yield a block of at least that size, or None once `cancelled` returns True while there is none.

        Raises:
            WeightsError: it cannot be allocated.
        """
        with self._released:
            while (block := self._pool.acquire(size_bytes)) is None:
                if cancelled():
                    break
                self._released.wait(_CHECK_S)
        try:
            yield block
        finally:
            if block is not None:
                with self._released:
                    self._pool.release(block)
                    self._released.notify_all()
