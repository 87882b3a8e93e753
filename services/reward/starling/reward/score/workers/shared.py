"""Memory for media that worker processes read: anonymous files (memfd), written once, then sealed.

The service writes a request's media into one buffer and passes its descriptor to the workers that score it
(SCM_RIGHTS). They map it. The seals keep every process, the service too, from changing or truncating what others read,
which would end them (SIGBUS).

What a decoder makes of latents goes the other way without a descriptor from a worker: the service makes a buffer of the
right length, sealed against others, passes it to the worker, which writes, and then seals it against writing, too. A
worker that could still write makes that fail.

A buffer is closed when nothing refers to it: requests, tasks, queued and sent calls do. So a call that returns to its
queue still has its media, and there is no count that could be wrong. A worker that has mapped it keeps the memory until
it has made its calls; calls are limited in time.
"""

from __future__ import annotations

import fcntl
import os
import resource
import threading
from collections.abc import Iterable
from typing import Final

LENGTH_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
MAX_BUFFERS: Final = 16
"""Of one task, with media; the decoding of latents has one more, for pixels."""
_SHARE_OF_DESCRIPTORS: Final = 0.5
"""Of what the process may open, for media; the rest is for connections and workers."""


class TooManyBuffersError(Exception):
    """The process may not open more buffers, or its memory is used up, before others are closed."""


class MediaMemory:
    """The buffers of a service, and how much memory they take. May be used in any thread.

    Args:
        max_buffers: limit on their number; without it, half of the descriptors that the process may open.
    """

    def __init__(self, max_buffers: int | None = None) -> None:
        if max_buffers is None:
            max_buffers = int(_SHARE_OF_DESCRIPTORS * resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self.max_buffers = max_buffers
        # A buffer may be closed by the garbage collector, in a thread that has the lock.
        self._lock = threading.RLock()
        self.num_buffers = self.size_bytes = 0
        """Of the buffers that are open, with what is reserved."""

    def share(self, parts: Iterable[bytes | memoryview]) -> SharedBuffer:
        """Return a buffer with these bytes.

        Raises:
            TooManyBuffersError: there are `max_buffers` already, or the system refuses one more, or memory for it.
        """
        return SharedBuffer(self, parts)

    def allocate(self, size_bytes: int) -> SharedBuffer:
        """Return a buffer of this length, which never changes, for a worker to write; it is to be sealed after that.

        Raises:
            TooManyBuffersError: as `share`.
        """
        return SharedBuffer(self, (), size_bytes)

    def _count(self, buffers: int, size_bytes: int) -> None:
        with self._lock:
            self.num_buffers += buffers
            self.size_bytes += size_bytes


class SharedBuffer:
    """A buffer of fixed length; `MediaMemory` makes it."""

    __slots__ = ("_fd", "_memory", "_reserved_bytes", "size_bytes")

    def __init__(self, memory: MediaMemory, parts: Iterable[bytes | memoryview], unwritten_bytes: int = 0) -> None:
        self._memory, self._fd, self.size_bytes, self._reserved_bytes = memory, -1, 0, 0
        memory._count(1, 0)
        if memory.num_buffers > memory.max_buffers:
            raise TooManyBuffersError(f"{memory.max_buffers} requests with media are held")
        try:
            self._fd = os.memfd_create("starling-media", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            for part in parts:
                self._write(memoryview(part).cast("B"))
            if unwritten_bytes:
                os.ftruncate(self._fd, unwritten_bytes)
                self._grow(unwritten_bytes)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, LENGTH_SEALS if unwritten_bytes else SEALS)
        except OSError as error:
            raise TooManyBuffersError(f"the system has no memory for media: {error.strerror}") from error

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._memory._count(-1, -self.size_bytes - self._reserved_bytes)

    def reserve(self, num_bytes: int) -> None:
        """Count memory that will be allocated for what is made of this buffer, until `release` or its end."""
        self._memory._count(0, num_bytes)
        self._reserved_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Count so much of what was reserved no more, since it is allocated now."""
        num_bytes = min(num_bytes, self._reserved_bytes)
        self._reserved_bytes -= num_bytes
        self._memory._count(0, -num_bytes)

    def fileno(self) -> int:
        """Its descriptor, which is open as long as this object is."""
        return self._fd

    def seal(self) -> None:
        """Let no process write to an allocated buffer any more. Raises ValueError when one could."""
        try:
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)
        except OSError as error:
            raise ValueError(f"the memory of media can still be changed ({error.strerror})") from error

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return a copy of some of its bytes."""
        data = os.pread(self._fd, num_bytes, offset)
        assert len(data) == num_bytes
        return data

    def _write(self, part: memoryview) -> None:
        while part:
            written = os.write(self._fd, part)
            self._grow(written)
            part = part[written:]

    def _grow(self, num_bytes: int) -> None:
        self.size_bytes += num_bytes
        self._memory._count(0, num_bytes)


def raise_descriptor_limit() -> None:
    """Let this process open as many files as the system allows: each request with media has one open."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
