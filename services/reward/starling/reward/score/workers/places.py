"""Places of tensors in a buffer: one after another, each at a multiple of `ALIGNMENT` bytes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

ALIGNMENT: Final = 64

Bytes = bytes | memoryview


def offsets_of(sizes_bytes: Iterable[int]) -> tuple[list[int], int]:
    """Return where tensors of these sizes begin in a buffer, and where the last one ends, in bytes."""
    offsets, end = list[int](), 0
    for size_bytes in sizes_bytes:
        offsets.append(-(-end // ALIGNMENT) * ALIGNMENT)
        end = offsets[-1] + size_bytes
    return offsets, end


def padded(tensors: Iterable[Iterable[Bytes]]) -> Iterator[Bytes]:
    """Yield the parts of tensors, with zeros before each, so that they begin where `offsets_of` says."""
    end = 0
    for parts in tensors:
        if end % ALIGNMENT:
            yield bytes(-end % ALIGNMENT)
            end += -end % ALIGNMENT
        for part in parts:
            yield part
            end += memoryview(part).nbytes
