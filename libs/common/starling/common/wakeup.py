"""An end to a wait on descriptors, from any thread, whenever it comes."""

from __future__ import annotations

import os
import threading


class Wakeup:
    """An eventfd to register with a poller beside what is waited for.

    Other threads may `set` it while its owner closes it: a bare descriptor would then be closed already, or be another
    file's by that time.
    """

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.RLock()  # reentrant: a signal handler may interrupt who holds it

    def fileno(self) -> int:
        """Return the descriptor, which is readable once it was `set`; -1 after `close`."""
        return self._descriptor

    def set(self) -> None:
        """End the wait; after `close` there is none. Safe in a signal handler."""
        with self._lock:
            if self._descriptor >= 0:
                os.eventfd_write(self._descriptor, 1)

    def clear(self) -> bool:
        """Forget, and return whether it was `set` since the last call."""
        with self._lock:
            if self._descriptor < 0:
                return False
            try:
                os.eventfd_read(self._descriptor)
            except BlockingIOError:
                return False
            return True

    def close(self) -> None:
        """Free the descriptor; nobody may wait on it any more. May be called twice."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)
