"""Memory for payloads on their way: what is not there is not taken, and what was taken once is used again."""

from __future__ import annotations

from starling.weightsync.memory.arrays import Memory, allocate
from starling.weightsync.plan.layout import aligned


class BufferPool:
    """Blocks of one piece of memory, first fit, which is there from the first block on. Used by one thread."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        """How much there is."""
        self._memory = allocate(0)
        self._free: list[tuple[int, int]] = []
        self.clear()

    @property
    def memory(self) -> Memory:
        """All of it, whoever has which block."""
        if not self._memory.nbytes and self.size_bytes:
            self._memory = allocate(self.size_bytes)
        return self._memory

    def clear(self) -> None:
        """Take every block back; nobody may use one any more."""
        self._free = [(0, self.size_bytes)] if self.size_bytes else []

    def take(self, size_bytes: int) -> Memory | None:
        """Return a block, or None when there is no room for it now. Raises WeightsError when there is no memory."""
        size = aligned(size_bytes)
        for index, (begin, length) in enumerate(self._free):
            if length >= size:
                memory = self.memory  # before it is counted as taken: there may be none
                self._free[index : index + 1] = [(begin + size, length - size)] if length > size else []
                return memory[begin : begin + size]
        return self._memory[:0] if size == 0 else None

    def give(self, block: Memory) -> None:
        """Give a block back."""
        if not block.nbytes:
            return
        begin = block.ctypes.data - self._memory.ctypes.data
        assert 0 <= begin < self.size_bytes, "a block of other memory was given back"
        merged: list[tuple[int, int]] = []
        for start, length in sorted([*self._free, (begin, block.nbytes)]):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._free = merged


class GrowingBufferPool:
    """Blocks of any sizes, kept when they are given back; `limit_bytes` in all, or a single larger one. One thread.

    There are never more blocks than were once taken at one time: a new one takes the place of kept ones, which are all
    too small by then.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._kept: list[Memory] = []
        self._taken_bytes = 0

    def take(self, size_bytes: int) -> Memory | None:
        """Return a block of at least that size, or None when there is no room for it now.

        Raises:
            WeightsError: there is no memory.
        """
        if not size_bytes:
            return allocate(0)
        fitting = [index for index, block in enumerate(self._kept) if block.nbytes >= size_bytes]
        if fitting:
            block = self._kept.pop(min(fitting, key=lambda index: self._kept[index].nbytes))
            self._taken_bytes += block.nbytes
            return block
        if self._taken_bytes and self._taken_bytes + size_bytes > self._limit_bytes:
            return None
        room = self._limit_bytes - self._taken_bytes - size_bytes
        freed = 0
        while self._kept and (freed < size_bytes or self.kept_bytes > room):
            freed += self._kept.pop(0).nbytes
        block = allocate(size_bytes)  # before it is counted as taken: there may be none
        self._taken_bytes += size_bytes
        return block

    @property
    def kept_bytes(self) -> int:
        """How much is there for the next who asks."""
        return sum(block.nbytes for block in self._kept)

    def give(self, block: Memory) -> None:
        """Give a block back."""
        self._taken_bytes -= block.nbytes
        if block.nbytes:
            self._kept.append(block)
