"""Thread that starts and ends worker processes, which takes some ten milliseconds each: others score meanwhile.

The kernel kills a process when the thread that has started it ends, so the thread lives as long as its workers.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Final

from starling.common.sandbox.threads import start_thread

_END_S: Final = 60.0
"""How long the jobs of a keeper that is closed may take; each has limits of its own."""


class WorkerKeeper:
    """Does jobs one after the other, in its thread.

    Raises:
        OSError: the thread cannot be started.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="worker-keeper", daemon=True)
        start_thread(self._thread)

    def submit(self, job: Callable[[], object]) -> None:
        """Do a job after those before it; it must not raise."""
        self._jobs.put(job)

    def close(self) -> None:
        """End the thread when its jobs are done, and wait for that."""
        self._jobs.put(None)
        self._thread.join(_END_S)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
