"""Jobs on memory that are too small for a thread of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, TypeVar

from starling.weightsync.memory.arrays import Array

T = TypeVar("T")

AT_ONCE_BYTES: Final = 1 << 20
"""Bytes that a thread which serves or pulls copies or digests by itself: that takes 0.2 ms, and to hand them over to
another one takes a millisecond where training and sampling keep the cores and the interpreter lock."""
AT_ONCE_ARRAYS: Final = 256
"""Arrays that these bytes are in, each of which takes a microsecond or two: a reader chooses their number."""


def is_small(num_arrays: int, num_bytes: int) -> bool:
    """Return whether a thread that serves or pulls copies or digests so many arrays by itself."""
    return num_arrays <= AT_ONCE_ARRAYS and num_bytes <= AT_ONCE_BYTES


def are_small(arrays: Sequence[Array]) -> bool:
    """Return `is_small` for `arrays`."""
    return is_small(len(arrays), sum(array.nbytes for array in arrays))


def done_at_once(job: Callable[[], T]) -> Future[T]:
    """Run a job now; return its result, or what it raised, as a future that is done."""
    future: Future[T] = Future()
    try:
        future.set_result(job())
    except Exception as error:  # noqa: BLE001 - the caller of `result` gets it, as from a pool
        future.set_exception(error)
    return future
