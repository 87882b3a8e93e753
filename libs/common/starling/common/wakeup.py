"""Wakeup of a thread that polls descriptors, from any other thread."""

from __future__ import annotations

import os
import threading


class Wakeup:
    """An eventfd that is registered with a poller together with the other descriptors.

    Other threads may `set` it while its owner closes it: the number of a bare descriptor could then belong to another
    file.
    """

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.RLock()  # reentrant: a signal handler may interrupt its holder

    def fileno(self) -> int:
        """Return the descriptor, which is readable after `set`; -1 after `close`."""
        return self._descriptor

    def set(self) -> None:
        """Wake the polling thread; no effect after `close`. Safe in a signal handler."""
        with self._lock:
            if self._descriptor >= 0:
                os.eventfd_write(self._descriptor, 1)

    def clear(self) -> bool:
        """Reset it, and return whether it was `set` since the last call."""
        with self._lock:
            if self._descriptor < 0:
                return False
            try:
                os.eventfd_read(self._descriptor)
            except BlockingIOError:
                return False
            return True

    def close(self) -> None:
        """Close the descriptor, on which no thread may wait any longer. May be called twice."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)
