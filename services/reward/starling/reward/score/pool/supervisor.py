"""Supervisor of the workers of a pool: starts those that lack, and ends those that are to be replaced.

A start and an end take tens of milliseconds, so each kind of workers has a thread for them (`keeper`). What follows
from them happens in the thread of the pool, which calls `run_callbacks`.
"""

from __future__ import annotations

import queue
import selectors
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from starling.common.errors import ConfigError
from starling.common.sandbox.launch import Sandboxing
from starling.common.wakeup import Wakeup
from starling.reward.score.pool.chunks import Chunk
from starling.reward.score.pool.kinds import KindState, KindTable
from starling.reward.score.pool.running import RunningWorker
from starling.reward.score.workers.process import WorkerExit, WorkerProcess


class WorkerSupervisor:
    """The running workers of a pool.

    Args:
        kinds: with the number of workers that each should have.
        sandboxing: how sandboxes of workers are made.
        clock: monotonic seconds.
        give_up: called with a kind of which too many starts have failed in a row and no worker is ready, and why.
    """

    def __init__(
        self,
        kinds: KindTable,
        sandboxing: Sandboxing,
        clock: Callable[[], float],
        give_up: Callable[[KindState, str], None],
    ) -> None:
        self._kinds, self._sandboxing, self._clock, self._give_up = kinds, sandboxing, clock, give_up
        self._workers: list[RunningWorker] = []
        self._is_closed = False
        self._callbacks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """What follows from jobs that keepers have done."""
        self._wakeup = Wakeup()
        self._selector = selectors.EpollSelector()
        self._selector.register(self._wakeup, selectors.EVENT_READ, None)

    @property
    def workers(self) -> Sequence[RunningWorker]:
        """Those that have been started, and not stopped."""
        return self._workers

    def of_kind(self, kind: KindState) -> list[RunningWorker]:
        """Return the workers of a kind."""
        return [worker for worker in self._workers if worker.kind is kind]

    def fileno(self) -> int:
        """A file descriptor that is readable when there is something to do; the same one until `close`."""
        return self._selector.fileno()

    def active(self, wait_s: float) -> Iterator[RunningWorker]:
        """Yield the workers that have sent something, have ended or can be sent more; waits up to `wait_s`.

        A worker that is stopped meanwhile is left out.
        """
        for key, _ in self._selector.select(wait_s):
            if key.data is None:
                self._wakeup.clear()
            elif key.data in self._workers:
                yield key.data

    def run_callbacks(self) -> None:
        """Do what follows from starts and ends of workers."""
        while not self._callbacks.empty():
            self._callbacks.get()()

    def send(self, worker: RunningWorker, chunk: Chunk) -> None:
        """Send a chunk to a worker; `flush` sends what the socket does not take now."""
        worker.process.send(chunk.message, chunk.buffers)
        if not worker.is_writing and not worker.process.flush():
            worker.is_writing = True
            self._selector.modify(worker.process, selectors.EVENT_READ | selectors.EVENT_WRITE, worker)

    def flush(self, worker: RunningWorker) -> None:
        """Send a worker what is left of its chunks."""
        if worker.is_writing and worker.process.flush():
            worker.is_writing = False
            self._selector.modify(worker.process, selectors.EVENT_READ, worker)

    # --- starts ---------------------------------------------------------------------------------------------------

    def start_lacking(self) -> None:
        """Begin to start the workers that lack, of kinds that need not wait after a failed start."""
        now = self._clock()
        for kind in self._kinds:
            if now < kind.start_at:
                continue
            for _ in range(self._num_lacking(kind)):
                kind.num_starting += 1
                kind.keeper.submit(partial(self._start, kind, kind.nice(now)))

    def await_starts(self) -> None:
        """Wait until no worker is being started."""
        while any(kind.num_starting for kind in self._kinds):
            self._callbacks.get()()

    def next_start(self) -> float | None:
        """When `start_lacking` has something to do, in monotonic seconds; None if no worker lacks."""
        return min((kind.start_at for kind in self._kinds if self._num_lacking(kind) > 0), default=None)

    def record_failed_start(self, kind: KindState, problem: str) -> None:
        """Count a failed start, `problem` being the end of a sentence, and give the kind up after too many."""
        is_last = kind.record_failed_start(self._clock())
        if is_last and not any(other.is_ready for other in self.of_kind(kind)):
            self._give_up(kind, problem)

    def _num_lacking(self, kind: KindState) -> int:
        """Return how many workers of a kind are to be started."""
        return kind.num_wanted - kind.num_starting - sum(worker.kind is kind for worker in self._workers)

    def _start(self, kind: KindState, nice: int) -> None:
        """Start a worker, in the thread of its keeper."""
        try:
            process = WorkerProcess(kind.workers, self._sandboxing, kind.allowance, nice)
        except (OSError, ConfigError) as error:  # for want of processes, or of what its needs name
            self._call_back(partial(self._not_started, kind, str(error)))
        except Exception as error:  # noqa: BLE001 - the edge of a thread
            self._call_back(partial(_raise, error))
        else:
            self._call_back(partial(self._started, kind, process))

    def _not_started(self, kind: KindState, problem: str) -> None:
        kind.num_starting -= 1
        if not self._is_closed:
            self.record_failed_start(kind, problem.rstrip("."))

    def _started(self, kind: KindState, process: WorkerProcess) -> None:
        kind.num_starting -= 1
        if self._is_closed:
            process.end()
        elif not kind.workers.scorers:  # they have workers of their own now
            kind.keeper.submit(process.end)
        else:
            worker = RunningWorker(process, kind, started_at=self._clock())
            self._workers.append(worker)
            self._selector.register(process, selectors.EVENT_READ, worker)

    # --- ends -----------------------------------------------------------------------------------------------------

    def stop(self, worker: RunningWorker, then: Callable[[RunningWorker, WorkerExit], None] | None = None) -> None:
        """Have a worker ended, unless it has exited; `then` is called later, with how it ended."""
        now = self._clock()
        if worker.has_settled(now):
            worker.kind.num_failed_starts = 0
        worker.kind.replaced_at.append(now)
        self._workers.remove(worker)
        self._selector.unregister(worker.process)
        worker.kind.keeper.submit(partial(self._await_exit, worker, then))

    def close(self, grace_s: float) -> None:
        """End all workers: idle ones may exit by themselves within `grace_s`, altogether; the others are killed."""
        self._is_closed = True
        until = self._clock() + grace_s
        for worker in self._workers:
            worker.process.close_socket()
        for worker in self._workers:
            is_idle = worker.is_ready and not worker.calls
            worker.kind.keeper.submit(partial(self._end, worker, until if is_idle else 0.0))
        for kind in self._kinds:
            kind.keeper.close()
        self.run_callbacks()  # of workers that were being started
        self._workers.clear()
        self._selector.close()
        self._wakeup.close()

    def _end(self, worker: RunningWorker, until: float) -> None:
        worker.process.end(max(0.0, until - self._clock()))

    def _await_exit(self, worker: RunningWorker, then: Callable[[RunningWorker, WorkerExit], None] | None) -> None:
        """Wait for the end of a worker, in the thread of its keeper."""
        try:
            exit = worker.process.exit_description() if worker.process.ended else worker.process.end()
        except Exception as error:  # noqa: BLE001 - the edge of a thread, without which no worker of its kind starts
            self._call_back(partial(_raise, error))
            return
        if then is not None:
            self._call_back(partial(self._ended, then, worker, exit))

    def _ended(
        self, then: Callable[[RunningWorker, WorkerExit], None], worker: RunningWorker, exit: WorkerExit
    ) -> None:
        if not self._is_closed:
            then(worker, exit)

    def _call_back(self, what: Callable[[], None]) -> None:
        """Have something done by the thread of the pool; called by the threads of keepers."""
        self._callbacks.put(what)
        self._wakeup.set()


def _raise(error: Exception) -> None:
    raise error
