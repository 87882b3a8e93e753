"""Pool of worker processes that score completions.

Everything happens inside `poll`, `submit` and `close`, but the start and the end of a worker, for which there are
threads (`supervisor`). The service's loop waits until `fileno()` is readable or `next_deadline()` has passed, and calls
`poll()`:

    pool.submit(task)
    while working:
        poller.poll(...)               # on pool.fileno() among others, at most until pool.next_deadline()
        for score in pool.poll(): ...

A *call* is one scorer on one completion, or on a batch of them; a function that is quick gets several, too. Calls are
sent to workers in chunks of about `CHUNK_S` of expected work, so that cheap scorers are not slowed by messages and
expensive ones spread over the workers. A worker reports after each call, with the time; so the service always knows a
worker's current call and when it began. Three outcomes are failures:

    the call raised, or returned no finite number    reward_error     the worker continues
    the worker process ended                         reward_error     it is replaced
    the call exceeded its time limit                 reward_timeout   it is killed (SIGKILL) and replaced

Only the worker's current call fails; the other calls that were sent to it return to the head of their queue. The
completions of a batch that fails are scored again one by one, unless the scorer judges whole groups; one that has ended
its worker or exceeded the limit alone is scored again `retries` times.

Scorers that need the same share workers, whose sandbox gives just that; each such kind of workers has its own queue.
Where no worker of a kind can be started, or none says of its scorers what can be true, each scorer gets workers of its
own. One of which that still holds is *quarantined*: its scores fail, and a worker is tried again and again, while the
others are scored as before. `poll` raises only when all of them are.

The parts, each with its own state:

    tasks        tasks in hand, and their scores
    forms        how each scorer is called, and what its reports mean
    queues       division of tasks into calls (divide, durations), and the calls that wait
    chunks       the message of calls to a worker, with their media
    kinds        kinds of workers, their queues and failed starts
    running      one worker, and the calls that it has been sent
    supervisor   start and end of workers
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self

import structlog

from starling.common.errors import ConfigError
from starling.common.sandbox.launch import choose, report
from starling.common.wire.messages import Status, Wait
from starling.reward.core.samples import LostCall, Score, ScoreTask
from starling.reward.score.pool.call import Call, UndividedSamples
from starling.reward.score.pool.chunks import chunk_of
from starling.reward.score.pool.forms import FORGED, ScorerForms
from starling.reward.score.pool.kinds import KindState, KindTable
from starling.reward.score.pool.queues import CallQueues
from starling.reward.score.pool.running import RunningWorker, TimeLimits
from starling.reward.score.pool.supervisor import WorkerSupervisor
from starling.reward.score.pool.tasks import TaskTable
from starling.reward.score.scorers.batch import ScorerForm
from starling.reward.score.workers.kinds import kinds_of
from starling.reward.score.workers.process import WorkerExit
from starling.reward.score.workers.protocol import (
    PROBLEM_CHARS,
    CallReport,
    FromWorker,
    WorkerReady,
    WorkerStartFailed,
)
from starling.reward.score.workers.shared import MAX_BUFFERS
from starling.reward.settings import RewardSettings

if TYPE_CHECKING:
    from starling.common.observe.metrics import Samples
    from starling.reward.score.metrics import ScorerTimes

log = structlog.get_logger(__name__)


class ScoringPool:
    """Worker processes that score tasks; they are started and ended by threads of the pool.

    Args:
        settings: of the service.
        clock: monotonic seconds.
        what: its scorers are called in texts.
        is_essential: whether the service cannot go on when all of its scorers are quarantined.

    Raises:
        ConfigError: the machine has not the sandbox that the settings demand.
        OSError: a thread cannot be started.
    """

    def __init__(
        self,
        settings: RewardSettings,
        clock: Callable[[], float] = time.monotonic,
        *,
        what: str = "scorer",
        is_essential: bool = True,
    ) -> None:
        self._scorers, self._clock, self._what, self._is_essential = settings.scorers, clock, what, is_essential
        self._titles = [scorer.title for scorer in settings.scorers]
        limits_s = tuple(scorer.timeout_s or settings.timeout_s for scorer in settings.scorers)
        self._limits = TimeLimits(settings.start_timeout_s, limits_s)
        sandboxing = choose(settings.sandbox)
        report(sandboxing, f"{what}s")
        self._tasks = TaskTable(self._titles, what)
        self._forms = ScorerForms(settings.scorers)
        self._kinds = KindTable(kinds_of(settings))
        self._queues = CallQueues(settings.scorers, self._kinds, self._forms, self._tasks)
        self._num_replaced = 0
        self._times: ScorerTimes | None = None
        """What the calls of the scorers took, where that is measured."""
        self._supervisor = WorkerSupervisor(self._kinds, sandboxing, clock, self._give_up)
        self._supervisor.start_lacking()
        self._supervisor.await_starts()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """A file descriptor that is readable when `poll` has something to do; the same one until `close`."""
        return self._supervisor.fileno()

    def submit(self, task: ScoreTask) -> None:
        """Start to score a task. Raises ValueError when its id is being scored already."""
        assert not task.media or len({id(tensor.buffer) for tensor in task.media}) <= MAX_BUFFERS
        state = self._tasks.add(task)
        if not state.num_left:
            return
        for scorer in task.scorers:
            self._queues.add(UndividedSamples(state, scorer, tuple(range(len(task.samples)))))
        self._dispatch(self._clock())

    def cancel(self, task_id: str) -> None:
        """Drop a task and its further scores. A running call continues, up to its time limit."""
        num_left = self._tasks.cancel(task_id)
        if num_left:
            self._queues.drop_cancelled(num_left)

    def poll(self, timeout_s: float = 0.0) -> list[Score]:
        """Return the new scores; waits up to `timeout_s` for the first.

        Raises ConfigError when no worker of any scorer can be started.
        """
        end = self._clock() + timeout_s
        while True:
            deadline = self.next_deadline()
            until = end if deadline is None else min(end, deadline)
            self._run_once(0.0 if self._tasks.has_scores else max(0.0, until - self._clock()))
            if self._tasks.has_scores or self._clock() >= end:
                return self._tasks.take_scores()

    def take_lost(self) -> list[LostCall]:
        """Return the calls that were given up since the last time."""
        return self._tasks.take_lost()

    def next_deadline(self) -> float | None:
        """When `poll` must be called at the latest, in monotonic seconds; None without such a time."""
        if self._tasks.has_scores:  # of samples that no worker is needed for
            return self._clock()
        deadlines = [worker.deadline(self._limits) for worker in self._supervisor.workers]
        deadlines.append(self._supervisor.next_start())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def form_of(self, scorer: int) -> ScorerForm | None:
        """Return how a scorer is called; None before a worker has loaded it."""
        return self._forms.get(scorer)

    @property
    def is_ready(self) -> bool:
        """Whether each scorer that is not quarantined is loaded in a worker."""
        loaded = {worker.kind for worker in self._supervisor.workers if worker.is_ready}
        return loaded.issuperset(kind for kind in self._kinds if kind.is_needed)

    def quarantined(self) -> dict[str, str]:
        """Return why no worker can be started, by the titles of the scorers that are quarantined."""
        return {
            self._titles[spec.index]: kind.problem
            for kind in self._kinds
            if kind.problem
            for spec in kind.workers.scorers
        }

    def worker_pids(self) -> tuple[int, ...]:
        """Return the process ids of the current workers."""
        return tuple(worker.process.pid for worker in self._supervisor.workers)

    def gauges(self) -> dict[str, float]:
        """Return measurements for the heartbeat."""
        return {
            "queue_depth": float(self._tasks.num_left),
            "workers_ready": float(sum(worker.is_ready for worker in self._supervisor.workers)),
            "workers_replaced": float(self._num_replaced),
            "scorers_quarantined": float(sum(bool(kind.problem) for kind in self._kinds)),
        }

    def measure(self) -> None:
        """Measure from now on what the calls of the scorers take."""
        # Imported here: a service whose metrics nobody can read does not load it.
        from starling.reward.score.metrics import ScorerTimes

        self._times = ScorerTimes(self._titles)

    def samples(self) -> Samples:
        """Return the measured metrics; none before `measure`."""
        return {} if self._times is None else self._times.samples()

    def waits(self) -> tuple[Wait, ...]:
        """Return what each busy worker does, with the time after which it is killed."""
        now, waits = self._clock(), []
        for worker in self._supervisor.workers:
            deadline = worker.deadline(self._limits)
            if deadline is None:
                continue
            what, since = "the imports of a worker", worker.started_at
            if worker.is_ready:
                call, since = worker.calls[0].call, worker.begun_at
                what = f"{self._what} {self._titles[call.scorer]} on {call.description} of {call.state.task.id}"
            on = f"worker {worker.process.pid}"
            waits.append(Wait(what=what, on=on, since_s=max(0.0, now - since), seconds_left=max(0.0, deadline - now)))
        if len(self._tasks) and not self._supervisor.workers:
            start_at = self._supervisor.next_start()
            left_s = 0.0 if start_at is None else max(0.0, start_at - now)
            waits.append(Wait(what="the next attempt to start a worker", on="clock", since_s=0.0, seconds_left=left_s))
        return tuple(waits)

    def close(self, grace_s: float = 0.5) -> None:
        """End all workers: idle ones may exit by themselves within `grace_s`, altogether; the others are killed."""
        self._supervisor.close(grace_s)
        self._tasks.clear()
        self._queues.clear()

    # --- one iteration of the loop --------------------------------------------------------------------------------

    def _run_once(self, wait_s: float) -> None:
        for worker in self._supervisor.active(wait_s):
            self._receive(worker)
        self._supervisor.run_callbacks()
        now = self._clock()
        for worker in list(self._supervisor.workers):
            deadline = worker.deadline(self._limits)
            if deadline is not None and deadline <= now:
                self._expire(worker)
        self._supervisor.start_lacking()
        self._dispatch(now)

    def _dispatch(self, now: float) -> None:
        """Send calls to the workers that have room, first to those with the least work."""
        for kind in self._kinds:
            free = [one for one in self._supervisor.of_kind(kind) if one.is_ready and one.has_room]
            while kind.queue and free:
                worker = min(free, key=lambda worker: worker.expected_s)
                calls = self._queues.take_chunk(kind)
                if not calls:
                    break
                self._send(worker, calls, now)
                if not worker.has_room:
                    free.remove(worker)

    def _send(self, worker: RunningWorker, calls: Sequence[Call], now: float) -> None:
        reads_media = any(self._forms[call.scorer].media != "text" for call in calls)
        chunk = chunk_of(calls, worker.next_serial, reads_media=reads_media)
        for call in calls:
            worker.add(call, self._queues.expected_s(call), now)
        self._supervisor.send(worker, chunk)

    # --- messages of workers --------------------------------------------------------------------------------------

    def _receive(self, worker: RunningWorker) -> None:
        for message in worker.process.receive():
            problem = self._handle(worker, message)
            report = message if isinstance(message, CallReport) else None
            if not problem and (report is None or not report.scores.is_exhausted):
                continue
            self._supervisor.stop(worker)
            if not problem:
                self._num_replaced += 1
                self._queues.put_back(worker.take_calls())
            elif worker.has_scored or (report is not None and worker.calls):
                self._fail_current_call(worker, Status.REWARD_ERROR, problem)
            else:
                self._fail_start(worker, problem)
            return
        if worker.process.ended:
            self._supervisor.stop(worker, self._handle_exit)
        else:
            self._supervisor.flush(worker)

    def _handle(self, worker: RunningWorker, message: FromWorker) -> str:
        """Handle one message. Returns why the worker has to be replaced: its start failed, or it cannot have sent the
        message at this point; empty if it need not be."""
        if isinstance(message, WorkerStartFailed):
            return FORGED if worker.is_ready else message.problem.rstrip(".")
        if isinstance(message, WorkerReady):
            return FORGED if worker.is_ready else self._make_ready(worker, message)
        if not worker.calls or worker.calls[0].serial != message.serial:
            return FORGED
        if not self._forms.is_report_of(worker.calls[0].call, message.scores):
            return FORGED
        self._finish(worker, message)
        return ""

    def _make_ready(self, worker: RunningWorker, message: WorkerReady) -> str:
        """Note that a worker has loaded its scorers; returns why it cannot be used, empty if it can."""
        kind = worker.kind
        problem = self._forms.learn({spec.index for spec in kind.workers.scorers}, message)
        if problem:
            return problem
        self._queues.divide_waiting()
        worker.ready_at = self._clock()
        if kind.problem:
            kind.problem = ""
            log.info("scorer_restored", scorer=self._titles[kind.workers.scorers[0].index])
        return ""

    def _finish(self, worker: RunningWorker, message: CallReport) -> None:
        """Settle the current call of a worker, or score its samples one by one if it was a batch that failed."""
        worker.kind.num_failed_starts = 0
        call, seconds = worker.finish(message.finished_at, self._clock())
        self._queues.record_duration(call, seconds)
        if self._times is not None:
            self._times.add(call.scorer, seconds, len(call.positions))
        results = self._forms.results_of(call, message.scores)
        is_failure = all(result.value is None for result in results)
        if is_failure and not self._forms[call.scorer].is_function and self._queues.put_back_divided(call):
            return
        for position, (value, problem, parts) in zip(call.positions, results, strict=True):
            status = Status.REWARD_ERROR if value is None else Status.OK
            self._tasks.settle(call, position, value, status, problem[:PROBLEM_CHARS], parts)

    # --- ends of workers ------------------------------------------------------------------------------------------

    def _handle_exit(self, worker: RunningWorker, exit: WorkerExit) -> None:
        """Fail the current call of a worker that has ended, or note that it could not be started."""
        if worker.is_ready and (worker.calls or worker.has_settled(self._clock())):
            self._fail_current_call(worker, Status.REWARD_ERROR, exit.problem)
        elif worker.is_ready:
            self._fail_start(worker, f"its process ended before any call ({exit.text})")
        else:
            self._fail_start(worker, f"the process ended while it imported the scorers ({exit.text})")

    def _expire(self, worker: RunningWorker) -> None:
        """Kill a worker that has exceeded its time limit."""
        self._supervisor.stop(worker)
        if not worker.is_ready:
            self._fail_start(worker, f"importing the scorers took longer than {self._limits.start_s:g} s")
            return
        limit_s = self._limits.calls_s[worker.calls[0].call.scorer]
        self._fail_current_call(worker, Status.REWARD_TIMEOUT, f"took longer than {limit_s:g} s")

    def _fail_current_call(self, worker: RunningWorker, status: Status, problem: str) -> None:
        """Fail the current call of an ended worker, or queue it again, as its other calls."""
        self._num_replaced += 1
        failed = worker.calls.popleft().call if worker.calls else None
        self._queues.put_back(worker.take_calls())
        if failed is None or failed.state.is_cancelled or self._queues.put_back_divided(failed):
            return
        if failed.num_retries < self._scorers[failed.scorer].retries:
            self._queues.put_back([failed._replace(num_retries=failed.num_retries + 1)])
            return
        reads_media = self._forms[failed.scorer].media != "text"
        self._tasks.give_up(failed, status, problem, reads_media=reads_media)

    def _fail_start(self, worker: RunningWorker, problem: str) -> None:
        self._queues.put_back(worker.take_calls())
        self._supervisor.record_failed_start(worker.kind, problem)

    # --- kinds of workers that cannot be started ------------------------------------------------------------------

    def _give_up(self, kind: KindState, problem: str) -> None:
        """Find out which scorer of a kind prevents the start of its workers, or quarantine the only one."""
        if len(kind.workers.scorers) > 1:
            self._separate(kind, problem)
        elif kind.workers.scorers:
            self._quarantine(kind, problem)

    def _separate(self, kind: KindState, problem: str) -> None:
        """Replace a kind of workers by one for each of its scorers, of which one hinders the others."""
        indices = [spec.index for spec in kind.workers.scorers]
        log.warning("scorers_separated", scorers=[self._titles[index] for index in indices], reason=problem)
        for other in self._supervisor.of_kind(kind):
            self._supervisor.stop(other)
        self._kinds.split(kind)
        for index in indices:
            self._forms.forget(index)  # another scorer may have said it
        self._queues.undivide(kind)

    def _quarantine(self, kind: KindState, problem: str) -> None:
        """Fail the scores of a scorer from now on, until one of its workers starts. Raises ConfigError when it is the
        last one that could be used."""
        if not kind.problem:
            title = self._titles[kind.workers.scorers[0].index]
            log.warning("scorer_quarantined", scorer=title, reason=problem)
        kind.problem = problem
        if self._is_essential and not any(one.is_needed for one in self._kinds):
            raise ConfigError(f"No scoring worker can be started: {problem}.")
        self._queues.fail_all(kind)
