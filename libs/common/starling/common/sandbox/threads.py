"""Threads beside a sandbox, whose code may take all tasks of its user or machine until it is killed."""

from __future__ import annotations

import errno
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

_START_S: Final = 10.0
"""How long a thread is tried to be started."""
_AGAIN_S: Final = 0.02


def start_thread(thread: threading.Thread) -> None:
    """Start a thread as soon as the kernel has a task for it.

    Raises:
        OSError: it has had none for some seconds.
    """
    until = time.monotonic() + _START_S
    while True:
        try:
            thread.start()
        except RuntimeError as error:
            if time.monotonic() > until:
                raise OSError(errno.EAGAIN, f"no thread can be started: {error}") from None
            time.sleep(_AGAIN_S)
        else:
            return


def started_thread(name: str) -> ThreadPoolExecutor:
    """Return an executor whose only thread has started."""
    executor = ThreadPoolExecutor(1, name)
    executor.submit(lambda: None).result(_START_S)
    return executor
