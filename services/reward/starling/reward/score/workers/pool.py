"""Pool of worker processes that score completions, and the check that they can import the scorers.

Everything happens inside `poll`, `submit` and `close`, but the start and the end of a worker, which take tens of
milliseconds: each kind of workers has a thread for them (`keeper`). The service's loop waits until `fileno()` is
readable or `next_deadline()` has passed, and calls `poll()`:

    pool.submit(task)
    while working:
        poller.poll(...)               # on pool.fileno() among others, at most until pool.next_deadline()
        for score in pool.poll(): ...

A *call* is one scorer on one completion, or on a batch of them; a function that is quick gets several, too. Calls are
sent to workers in chunks of about `_CHUNK_S` of expected work, so that cheap scorers are not slowed by messages and
expensive ones spread over the workers. A worker reports after each call, with the time; so the service always knows a
worker's current call and when it began. Three
outcomes are failures:

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
"""

from __future__ import annotations

import math
import queue
import select
import selectors
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, NamedTuple, Self

import structlog

from starling.common.errors import ConfigError
from starling.common.sandbox.launch import Sandboxing, choose, report
from starling.common.sandbox.output import OutputAllowance
from starling.common.wakeup import Wakeup
from starling.common.wire.messages import Status, Wait
from starling.reward.core.media import MediaTensor, lacks
from starling.reward.core.samples import LostCall, Sample, Score, ScoreTask
from starling.reward.score.scorers.batch import MAX_BATCH, SCORE, BatchScores, ScorerForm, checked_form
from starling.reward.score.workers.keeper import WorkerKeeper
from starling.reward.score.workers.kinds import WorkerKind, kinds_of
from starling.reward.score.workers.process import WorkerExit, WorkerProcess
from starling.reward.score.workers.protocol import (
    PROBLEM_CHARS,
    CallChunk,
    CallReport,
    FromWorker,
    PlacedMedia,
    WorkerReady,
    WorkerStartFailed,
)
from starling.reward.score.workers.shared import MAX_BUFFERS, SharedBuffer
from starling.reward.settings import RewardSettings, ScorerSettings

log = structlog.get_logger(__name__)

_CHUNK_S: Final = 0.004
"""Expected seconds of work in a chunk; a worker gets another chunk when it has less than this left."""
_CHUNK_CALLS: Final = 64
"""Limit on the calls of a chunk. Twice as many reports fit a socket's buffer, so a worker never waits to report."""
_SHORT_S: Final = 0.001
"""Expected seconds of a call of a function for several completions: their reports would cost more than the work."""
_UNKNOWN_S: Final = 0.05
"""Expected seconds of a call before the first measurement: one call at a time."""
_MOST_FAILED_STARTS: Final = 3
_RETRY_S: Final = 0.5
_LONGEST_RETRY_S: Final = 30.0
_OFTEN: Final = 3
_OFTEN_S: Final = 60.0
_NICE: Final = 10
"""Where so many workers of a kind were replaced within so many seconds, further ones have a lower priority: what loops
or ends again and again would have most of the processors, and the requests of other scorers would wait."""
_FORGED: Final = "sent a message in its worker's name"
_SETTLED_S: Final = 10.0
"""A worker that ends sooner after its start, without having made a call, could not be started."""


@dataclass(slots=True, eq=False)
class _TaskState:
    task: ScoreTask
    cancelled: bool = False
    num_left: int = 0


class _Call(NamedTuple):
    state: _TaskState
    positions: tuple[int, ...]
    """Indices of the samples in the task."""
    scorer: int
    num_retries: int = 0
    """How often it has ended its worker, or exceeded the limit."""

    @property
    def samples(self) -> tuple[Sample, ...]:
        return tuple(self.state.task.samples[position] for position in self.positions)

    @property
    def what(self) -> str:
        """Its samples, for waits."""
        first = self.samples[0].index
        return (
            f"completion {first}" if len(self.positions) == 1 else f"{len(self.positions)} completions from {first} on"
        )


class _Undivided(NamedTuple):
    """Samples that wait for the form of a scorer to be divided into calls."""

    state: _TaskState
    scorer: int
    positions: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Kind:
    """Workers that are alike, and the calls that wait for them."""

    workers: WorkerKind
    allowance: OutputAllowance = field(default_factory=OutputAllowance)
    """How much of what they print is logged, of all together."""
    keeper: WorkerKeeper = field(default_factory=WorkerKeeper)
    """Starts and ends them."""
    num_starting: int = 0
    """Workers that the keeper is to start."""
    queue: deque[_Call] = field(default_factory=deque)
    num_failed_starts: int = 0
    """In a row."""
    start_at: float = 0.0
    """When the next worker may be started."""
    replaced_at: deque[float] = field(default_factory=lambda: deque(maxlen=_OFTEN))
    """When workers were last replaced."""
    problem: str = ""
    """Why no worker can be started; its scorer is quarantined then."""

    @property
    def num_wanted(self) -> int:
        """Number of workers that it should have."""
        return min(1, self.workers.num_workers) if self.problem else self.workers.num_workers

    @property
    def is_needed(self) -> bool:
        """Whether it has scorers that can be used."""
        return bool(self.workers.scorers) and not self.problem


class _SentCall(NamedTuple):
    call: _Call
    serial: int
    expected_s: float
    sent_at: float


@dataclass(slots=True, eq=False)
class _Worker:
    process: WorkerProcess
    kind: _Kind
    started_at: float
    ready: bool = False
    ready_at: float = 0.0
    has_scored: bool = False
    """Whether it has reported a call."""
    serial: int = 0
    calls: deque[_SentCall] = field(default_factory=deque)
    """Sent and not reported, in order; the first is the current call."""
    begun_at: float = 0.0
    """When the worker began the first of `calls`."""
    expected_s: float = 0.0
    """Expected seconds of `calls`."""
    is_writing: bool = False
    """Whether a message waits for space in the socket's buffer."""


class ScoringPool:
    """Worker processes that score tasks; they are started and ended by threads of the pool.

    Args:
        settings: of the service.
        clock: monotonic seconds.
        what: its scorers are called in texts.
        is_essential: whether the service cannot go on when all of its scorers are quarantined.
    """

    def __init__(
        self,
        settings: RewardSettings,
        clock: Callable[[], float] = time.monotonic,
        *,
        what: str = "scorer",
        is_essential: bool = True,
    ) -> None:
        self._is_essential = is_essential
        self._settings, self._sandboxing, self._what = settings, choose(settings.sandbox), what
        report(self._sandboxing, f"{what}s")
        self._kinds = [_Kind(kind) for kind in kinds_of(settings)]
        self._kind_of = {spec.index: kind for kind in self._kinds for spec in kind.workers.scorers}
        self._limits_s = [scorer.timeout_s or settings.timeout_s for scorer in settings.scorers]
        self._expected_s = [_UNKNOWN_S] * len(settings.scorers)
        """Of one call; of one completion where a function judges it."""
        self._forms: dict[int, ScorerForm] = {}
        """How each scorer is called; known once a worker has loaded it."""
        self._columns: dict[int, tuple[int, ...]] = {}
        """Which of its keys each scorer's value is the sum of."""
        self._undivided: list[_Undivided] = []
        self._clock = clock
        self._selector = selectors.EpollSelector()
        self._tasks: dict[str, _TaskState] = {}
        self._scores: list[Score] = []
        self._lost: list[LostCall] = []
        self._workers: list[_Worker] = []
        self._num_cancelled = 0
        """At most so many of the queued calls are of cancelled tasks."""
        self._num_replaced = 0
        self._is_closed = False
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """What follows from jobs that keepers have done, to be called by the thread of this pool."""
        self._wakeup = Wakeup()
        self._selector.register(self._wakeup, selectors.EVENT_READ, None)
        self._start_workers()
        while any(kind.num_starting for kind in self._kinds):
            self._done.get()()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """A file descriptor that is readable when `poll` has something to do; the same one until `close`."""
        return self._selector.fileno()

    def submit(self, task: ScoreTask) -> None:
        """Start to score a task. Raises ValueError when its id is being scored already."""
        if task.id in self._tasks:
            raise ValueError(f"task {task.id!r} is being scored already")
        assert not task.media or len({id(tensor.buffer) for tensor in task.media}) <= MAX_BUFFERS
        state = _TaskState(task, num_left=len(task.samples) * len(task.scorers))
        if not state.num_left:
            return
        self._tasks[task.id] = state
        for scorer in task.scorers:
            self._enqueue(_Undivided(state, scorer, tuple(range(len(task.samples)))))
        self._dispatch(self._clock())

    def _enqueue(self, samples: _Undivided) -> None:
        """Divide samples of a task into calls of a scorer, if its form is known, or fail them if it is quarantined."""
        state, scorer, positions = samples
        kind, form = self._kind_of[scorer], self._forms.get(scorer)
        if kind.problem:
            for position in positions:
                self._settle(_Call(state, positions, scorer), position, None, Status.REWARD_ERROR, _quarantined(kind))
        elif form is None:
            self._undivided.append(samples)
        else:
            if form.media != "text":
                positions = self._with_media(samples, form)
            calls = _divided(state.task, positions, form, self._batch_size(scorer, form))
            kind.queue.extend(_Call(state, some, scorer) for some in calls)

    def _batch_size(self, scorer: int, form: ScorerForm) -> int:
        """Return how many completions a call of a scorer may have; for a function, what it does in `_SHORT_S`."""
        if not form.is_function:
            return self._settings.scorers[scorer].batch_size or form.batch_size
        return max(1, int(min(MAX_BATCH, _SHORT_S / max(self._expected_s[scorer], 1e-9))))

    def _expected_of(self, call: _Call) -> float:
        """Return the expected seconds of a call."""
        expected_s = self._expected_s[call.scorer]
        return expected_s * len(call.positions) if self._forms[call.scorer].is_function else expected_s

    def _with_media(self, samples: _Undivided, form: ScorerForm) -> tuple[int, ...]:
        """Return the positions of the samples that a scorer of media can score; the others fail."""
        state, scorer, positions = samples
        task = state.task
        lacking = [lacks(form.media, task.media_kind(sample)) for sample in task.samples]
        groups = {sample.prompt for sample, lacks_media in zip(task.samples, lacking, strict=True) if lacks_media}
        able = []
        for position in positions:
            if lacking[position]:
                problem = f"reads {form.media}, and the completion has none; send them with it"
            elif form.scope == "groupwise" and task.samples[position].prompt in groups:
                problem = f"reads {form.media} of whole groups, and another completion of its group has none"
            else:
                able.append(position)
                continue
            self._settle(_Call(state, (position,), scorer), position, None, Status.REWARD_ERROR, problem)
        return tuple(able)

    def cancel(self, task_id: str) -> None:
        """Drop a task and its further scores. A running call continues, up to its time limit."""
        state = self._tasks.pop(task_id, None)
        if state is None:
            return
        state.cancelled = True
        self._num_cancelled += state.num_left
        if 2 * self._num_cancelled > sum(len(kind.queue) for kind in self._kinds) + len(self._undivided):
            self._forget_cancelled()

    def _forget_cancelled(self) -> None:
        """Drop the calls of cancelled tasks, which would otherwise wait for a worker."""
        self._num_cancelled = 0
        for kind in self._kinds:
            kind.queue = deque(call for call in kind.queue if not call.state.cancelled)
        self._undivided = [samples for samples in self._undivided if not samples.state.cancelled]

    def poll(self, timeout_s: float = 0.0) -> list[Score]:
        """Return the new scores; waits up to `timeout_s` for the first.

        Raises ConfigError when no worker of any scorer can be started.
        """
        end = self._clock() + timeout_s
        while True:
            deadline = self.next_deadline()
            until = end if deadline is None else min(end, deadline)
            self._run_once(0.0 if self._scores else max(0.0, until - self._clock()))
            if self._scores or self._clock() >= end:
                break
        scores, self._scores = self._scores, []
        return scores

    def take_lost(self) -> list[LostCall]:
        """Return the calls that were given up since the last time."""
        lost, self._lost = self._lost, []
        return lost

    def next_deadline(self) -> float | None:
        """When `poll` must be called at the latest, in monotonic seconds; None without such a time."""
        if self._scores:  # of samples that no worker is needed for
            return self._clock()
        deadlines = [d for worker in self._workers if (d := self._deadline(worker)) is not None]
        deadlines += [kind.start_at for kind in self._kinds if self._num_lacking(kind) > 0]
        return min(deadlines, default=None)

    def form_of(self, scorer: int) -> ScorerForm | None:
        """Return how a scorer is called; None before a worker has loaded it."""
        return self._forms.get(scorer)

    @property
    def is_ready(self) -> bool:
        """Whether each scorer that is not quarantined is loaded in a worker."""
        loaded = {worker.kind for worker in self._workers if worker.ready}
        return loaded.issuperset(kind for kind in self._kinds if kind.is_needed)

    def quarantined(self) -> dict[str, str]:
        """Return why no worker can be started, by the titles of the scorers that are quarantined."""
        return {
            self._settings.scorers[spec.index].title: kind.problem
            for kind in self._kinds
            if kind.problem
            for spec in kind.workers.scorers
        }

    def worker_pids(self) -> tuple[int, ...]:
        """Return the process ids of the current workers."""
        return tuple(worker.process.pid for worker in self._workers)

    def gauges(self) -> dict[str, float]:
        """Return measurements for the heartbeat."""
        return {
            "queue_depth": float(sum(state.num_left for state in self._tasks.values())),
            "workers_ready": float(sum(worker.ready for worker in self._workers)),
            "workers_replaced": float(self._num_replaced),
            "scorers_quarantined": float(sum(bool(kind.problem) for kind in self._kinds)),
        }

    def waits(self) -> tuple[Wait, ...]:
        """Return what each busy worker does, with the time after which it is killed."""
        now, waits = self._clock(), []
        for worker in self._workers:
            deadline = self._deadline(worker)
            if deadline is None:
                continue
            what, since = "the imports of a worker", worker.started_at
            if worker.ready:
                call, _, _, sent_at = worker.calls[0]
                since = max(worker.begun_at, sent_at)
                title = self._settings.scorers[call.scorer].title
                what = f"{self._what} {title} on {call.what} of {call.state.task.id}"
            on = f"worker {worker.process.pid}"
            waits.append(Wait(what=what, on=on, since_s=max(0.0, now - since), seconds_left=max(0.0, deadline - now)))
        if self._tasks and not self._workers:
            start_at = min((kind.start_at for kind in self._kinds if self._num_lacking(kind) > 0), default=now)
            on, left_s = "clock", max(0.0, start_at - now)
            waits.append(Wait(what="the next attempt to start a worker", on=on, since_s=0.0, seconds_left=left_s))
        return tuple(waits)

    def close(self, grace_s: float = 0.5) -> None:
        """End all workers: idle ones may exit by themselves within `grace_s`, altogether; the others are killed."""
        self._is_closed = True
        until = self._clock() + grace_s
        for worker in self._workers:
            worker.process.close_socket()
        for worker in self._workers:
            worker.kind.keeper.submit(partial(self._end, worker, until if worker.ready and not worker.calls else 0.0))
        for kind in self._kinds:
            kind.keeper.close()
        while not self._done.empty():  # workers that were being started
            self._done.get()()
        self._workers.clear()
        self._tasks.clear()
        for kind in self._kinds:
            kind.queue.clear()
        self._selector.close()
        self._wakeup.close()

    def _end(self, worker: _Worker, until: float) -> None:
        worker.process.end(max(0.0, until - self._clock()))

    # --- one iteration of the loop -------------------------------------------------------------------------------

    def _run_once(self, wait_s: float) -> None:
        for key, _ in self._selector.select(wait_s):
            if key.data is None:
                self._wakeup.clear()
            elif key.data in self._workers:  # else it has been stopped meanwhile
                self._receive(key.data)
        while not self._done.empty():
            self._done.get()()
        now = self._clock()
        for worker in list(self._workers):
            deadline = self._deadline(worker)
            if deadline is not None and deadline <= now:
                self._expire(worker)
        self._start_workers()
        self._dispatch(now)

    def _receive(self, worker: _Worker) -> None:
        for message in worker.process.receive():
            problem = self._handle(worker, message)
            report = message if isinstance(message, CallReport) else None
            if not problem and (report is None or not report.scores.is_exhausted):
                continue
            self._stop_worker(worker)
            if not problem:
                self._num_replaced += 1
                self._return_calls(worker)
            elif worker.has_scored or (report is not None and worker.calls):
                self._fail_current_call(worker, Status.REWARD_ERROR, problem)
            else:
                self._start_failed(worker, problem)
            return
        if worker.process.ended:
            self._stop_worker(worker, self._handle_exit)
        elif worker.is_writing and worker.process.flush():
            worker.is_writing = False
            self._selector.modify(worker.process, selectors.EVENT_READ, worker)

    def _handle_exit(self, worker: _Worker, exit: WorkerExit) -> None:
        """Fail the current call of a worker that has ended, or note that it could not be started."""
        if worker.ready and (worker.calls or self._has_settled(worker)):
            self._fail_current_call(worker, Status.REWARD_ERROR, exit.problem)
        elif worker.ready:
            self._start_failed(worker, f"its process ended before any call ({exit.text})")
        else:
            self._start_failed(worker, f"the process ended while it imported the scorers ({exit.text})")

    def _handle(self, worker: _Worker, message: FromWorker) -> str:
        """Handle one message. Returns why the worker has to be replaced: its start failed, or it cannot have sent the
        message at this point; empty if it need not be."""
        if isinstance(message, WorkerStartFailed):
            return _FORGED if worker.ready else message.problem.rstrip(".")
        if isinstance(message, WorkerReady):
            problem = _FORGED if worker.ready else self._learn_forms(worker.kind, message)
            if not problem:
                worker.ready, worker.ready_at = True, self._clock()
                self._end_quarantine(worker.kind)
            return problem
        if not worker.calls or worker.calls[0].serial != message.serial:
            return _FORGED
        if not self._is_report_of(worker.calls[0].call, message.scores):
            return _FORGED
        self._finish(worker, message)
        return ""

    def _learn_forms(self, kind: _Kind, message: WorkerReady) -> str:
        """Note how the scorers of a kind are called; return why the message cannot be true, empty if it can."""
        forms = dict(message.forms)
        if forms.keys() != {spec.index for spec in kind.workers.scorers} or len(forms) != len(message.forms):
            return _FORGED
        columns: dict[int, tuple[int, ...]] = {}
        try:
            forms = {scorer: checked_form("", *form) for scorer, form in forms.items()}
        except ConfigError:  # a scorer sent it in the worker's name
            return _FORGED
        try:
            for scorer, form in forms.items():
                columns[scorer] = columns_of(self._settings.scorers[scorer], form)
        except ConfigError as error:
            return str(error).rstrip(".")
        if any(self._forms.get(scorer, form) != form for scorer, form in forms.items()):
            return _FORGED
        self._forms |= forms
        self._columns |= columns
        waiting, self._undivided = self._undivided, []
        for samples in waiting:
            if not samples.state.cancelled:
                self._enqueue(samples)
        return ""

    def _is_report_of(self, call: _Call, scores: BatchScores) -> bool:
        """Return whether a worker could have reported these scores, all of which are finite."""
        num_keys = len(self._forms[call.scorer].keys)
        if not len(scores.values) == len(scores.problems) == len(call.positions):
            return False
        for values in scores.values:
            if len(values) != num_keys:
                return False
            for value in values:
                if value is not None and not math.isfinite(value):
                    return False
        return True

    def _finish(self, worker: _Worker, report: CallReport) -> None:
        worker.has_scored, worker.kind.num_failed_starts = True, 0
        call, _, expected_s, sent_at = worker.calls.popleft()
        worker.expected_s = worker.expected_s - expected_s if worker.calls else 0.0
        begun_at = max(worker.begun_at, sent_at)
        finished_at = min(max(begun_at, report.finished_at), self._clock())  # in this order, NaN is not taken
        worker.begun_at = finished_at
        scores, (keys, _, _, _, is_function) = report.scores, self._forms[call.scorer]
        took_s = (finished_at - begun_at) / (len(call.positions) if is_function else 1)
        self._expected_s[call.scorer] += 0.3 * (took_s - self._expected_s[call.scorer])
        names_its_scores = keys not in ((SCORE,), (self._settings.scorers[call.scorer].title,))
        found = [self._value(call.scorer, values) for values in scores.values]
        if not is_function and all(value is None for value, _ in found) and self._separate(call):
            return
        for row, (position, (value, why)) in enumerate(zip(call.positions, found, strict=True)):
            problem, values = scores.problems[row], scores.values[row]
            parts = tuple(zip(keys, values, strict=True)) if names_its_scores else ()
            if value is None:
                self._settle(call, position, None, Status.REWARD_ERROR, (problem or why)[:PROBLEM_CHARS], parts)
            else:
                self._settle(call, position, value, parts=parts)

    def _value(self, scorer: int, values: tuple[float | None, ...]) -> tuple[float | None, str]:
        """Return the sum of the scores that the recipe's `key` names, or None and what is wrong."""
        if len(values) == 1:  # most scorers
            return values[0], "returned no score"
        terms = [values[column] for column in self._columns[scorer]]
        chosen = [term for term in terms if term is not None]
        if len(chosen) < len(terms):
            return None, "returned no score"
        total = sum(chosen)
        return (total, "") if math.isfinite(total) else (None, "returned scores whose sum is too large for a float")

    def _separate(self, call: _Call) -> bool:
        """Queue the samples of a failed batch one by one; return False if it is no batch, or they belong together."""
        if len(call.positions) == 1 or self._forms[call.scorer].scope == "groupwise":
            return False
        alone = [call._replace(positions=(position,)) for position in call.positions]
        self._kind_of[call.scorer].queue.extendleft(reversed(alone))
        return True

    def _settle(
        self,
        call: _Call,
        position: int,
        value: float | None,
        status: Status = Status.OK,
        problem: str = "",
        parts: tuple[tuple[str, float | None], ...] = (),
    ) -> None:
        state = call.state
        if state.cancelled:
            return
        state.num_left -= 1
        if not state.num_left:
            del self._tasks[state.task.id]
        if problem:
            problem = f"{self._what} {self._settings.scorers[call.scorer].title!r} {problem}."
        index = state.task.samples[position].index
        self._scores.append(Score(state.task.id, index, call.scorer, value, status, problem, parts))

    # --- start and end of workers --------------------------------------------------------------------------------

    def _deadline(self, worker: _Worker) -> float | None:
        if not worker.ready:
            return worker.started_at + self._settings.start_timeout_s
        if not worker.calls:
            return None
        first = worker.calls[0]
        return max(worker.begun_at, first.sent_at) + self._limits_s[first.call.scorer]

    def _expire(self, worker: _Worker) -> None:
        self._stop_worker(worker)
        if not worker.ready:
            limit_s = self._settings.start_timeout_s
            self._start_failed(worker, f"importing the scorers took longer than {limit_s:g} s")
            return
        limit_s = self._limits_s[worker.calls[0].call.scorer]
        self._fail_current_call(worker, Status.REWARD_TIMEOUT, f"took longer than {limit_s:g} s")

    def _fail_current_call(self, worker: _Worker, status: Status, problem: str) -> None:
        """Fail the current call of an ended worker, or queue it again, as its other calls."""
        self._num_replaced += 1
        failed = worker.calls.popleft().call if worker.calls else None
        self._return_calls(worker)
        if failed is None or failed.state.cancelled or self._separate(failed):
            return
        if failed.num_retries < self._settings.scorers[failed.scorer].retries:
            worker.kind.queue.appendleft(failed._replace(num_retries=failed.num_retries + 1))
            return
        for position in failed.positions:
            self._settle(failed, position, None, status, problem)
        self._lost.append(self._lost_call(failed, self._scores[-1].problem))

    def _lost_call(self, call: _Call, problem: str) -> LostCall:
        task, samples = call.state.task, call.samples
        media: tuple[tuple[MediaTensor, int], ...] = ()
        if self._forms[call.scorer].media != "text":
            media = tuple((task.media[one.media.tensor], one.media.row) for one in samples if one.media is not None)
        completions = tuple(sample.completion for sample in samples)
        return LostCall(call.scorer, task.prompts[samples[0].prompt], completions, problem, media)

    def _return_calls(self, worker: _Worker) -> None:
        """Put the calls of an ended worker back to the head of their queue."""
        worker.kind.queue.extendleft(sent.call for sent in reversed(worker.calls))
        worker.calls.clear()

    def _has_settled(self, worker: _Worker) -> bool:
        return worker.has_scored or self._clock() - worker.ready_at >= _SETTLED_S

    def _start_failed(self, worker: _Worker, problem: str) -> None:
        self._return_calls(worker)
        self._count_failed_start(worker.kind, problem)

    def _count_failed_start(self, kind: _Kind, problem: str) -> None:
        kind.num_failed_starts += 1
        kind.start_at = self._clock() + min(_RETRY_S * 2**kind.num_failed_starts, _LONGEST_RETRY_S)
        if kind.num_failed_starts < _MOST_FAILED_STARTS or any(
            other.ready for other in self._workers if other.kind is kind
        ):
            return
        if len(kind.workers.scorers) > 1:
            self._give_workers_of_their_own(kind, problem)
        elif kind.workers.scorers:
            self._quarantine(kind, problem)

    def _give_workers_of_their_own(self, kind: _Kind, problem: str) -> None:
        """Replace a kind of workers by one for each of its scorers, of which one hinders the others."""
        titles = [self._settings.scorers[spec.index].title for spec in kind.workers.scorers]
        log.warning("scorers_separated", scorers=titles, reason=problem)
        for other in [other for other in self._workers if other.kind is kind]:
            self._stop_worker(other)
        for spec in kind.workers.scorers:
            own = _Kind(replace(kind.workers, scorers=(spec,)))
            self._kinds.append(own)
            self._kind_of[spec.index] = own
            self._forms.pop(spec.index, None)  # another scorer may have said it
        kind.workers = replace(kind.workers, scorers=(), num_workers=0)
        waiting: dict[tuple[int, int], _Undivided] = {}
        for call in kind.queue:
            key = (id(call.state), call.scorer)
            positions = waiting[key].positions if key in waiting else ()
            waiting[key] = _Undivided(call.state, call.scorer, (*positions, *call.positions))
        kind.queue.clear()
        self._undivided += [one._replace(positions=tuple(sorted(one.positions))) for one in waiting.values()]

    def _quarantine(self, kind: _Kind, problem: str) -> None:
        """Fail the scores of a scorer from now on, until one of its workers starts. Raises ConfigError when it is the
        last one that could be used."""
        if not kind.problem:
            title = self._settings.scorers[kind.workers.scorers[0].index].title
            log.warning("scorer_quarantined", scorer=title, reason=problem)
        kind.problem = problem
        if self._is_essential and not any(one.is_needed for one in self._kinds):
            raise ConfigError(f"No scoring worker can be started: {problem}.")
        scorers = {spec.index for spec in kind.workers.scorers}
        waiting = [_Undivided(call.state, call.scorer, call.positions) for call in kind.queue]
        waiting += [samples for samples in self._undivided if samples.scorer in scorers]
        self._undivided = [samples for samples in self._undivided if samples.scorer not in scorers]
        kind.queue.clear()
        for samples in waiting:
            if not samples.state.cancelled:
                self._enqueue(samples)

    def _end_quarantine(self, kind: _Kind) -> None:
        if kind.problem:
            kind.problem = ""
            log.info("scorer_restored", scorer=self._settings.scorers[kind.workers.scorers[0].index].title)

    def _stop_worker(self, worker: _Worker, then: Callable[[_Worker, WorkerExit], None] | None = None) -> None:
        """Have a worker ended, unless it has exited; `then` is called later, with how it ended."""
        if worker.ready and self._has_settled(worker):
            worker.kind.num_failed_starts = 0
        worker.kind.replaced_at.append(self._clock())
        self._workers.remove(worker)
        self._selector.unregister(worker.process)
        worker.kind.keeper.submit(partial(self._wait_exit, worker, then))

    def _wait_exit(self, worker: _Worker, then: Callable[[_Worker, WorkerExit], None] | None) -> None:
        """Wait for the end of a worker, in the thread of its keeper."""
        exit = worker.process.exit_description() if worker.process.ended else worker.process.end()
        if then is not None:
            self._call_back(partial(self._handle_unless_closed, then, worker, exit))

    def _handle_unless_closed(
        self, then: Callable[[_Worker, WorkerExit], None], worker: _Worker, exit: WorkerExit
    ) -> None:
        if not self._is_closed:
            then(worker, exit)

    def _start_workers(self) -> None:
        now = self._clock()
        for kind in self._kinds:
            if now < kind.start_at:
                continue
            for _ in range(self._num_lacking(kind)):
                kind.num_starting += 1
                is_often = len(kind.replaced_at) == _OFTEN and now - kind.replaced_at[0] < _OFTEN_S
                kind.keeper.submit(partial(self._start, kind, _NICE if is_often else 0))

    def _start(self, kind: _Kind, nice: int) -> None:
        """Start a worker, in the thread of its keeper."""
        try:
            process = WorkerProcess(kind.workers, self._sandboxing, kind.allowance, nice)
        except (OSError, ConfigError) as error:  # for want of processes, or of what its needs name
            self._call_back(partial(self._not_started, kind, str(error)))
        except Exception as error:  # noqa: BLE001 - the edge of a thread
            self._call_back(partial(_raise, error))
        else:
            self._call_back(partial(self._started, kind, process))

    def _call_back(self, what: Callable[[], None]) -> None:
        self._done.put(what)
        self._wakeup.set()

    def _not_started(self, kind: _Kind, problem: str) -> None:
        kind.num_starting -= 1
        if not self._is_closed:
            self._count_failed_start(kind, problem.rstrip("."))

    def _started(self, kind: _Kind, process: WorkerProcess) -> None:
        kind.num_starting -= 1
        if self._is_closed:
            process.end()
        elif not kind.workers.scorers:  # they have workers of their own now
            kind.keeper.submit(process.end)
        else:
            worker = _Worker(process, kind, started_at=self._clock())
            self._workers.append(worker)
            self._selector.register(process, selectors.EVENT_READ, worker)

    def _num_lacking(self, kind: _Kind) -> int:
        """Return how many workers of a kind are to be started."""
        return kind.num_wanted - kind.num_starting - sum(worker.kind is kind for worker in self._workers)

    # --- dispatch ------------------------------------------------------------------------------------------------

    def _dispatch(self, now: float) -> None:
        for kind in self._kinds:
            free = [worker for worker in self._workers if worker.kind is kind and worker.ready and _has_room(worker)]
            while kind.queue and free:
                worker = min(free, key=lambda worker: worker.expected_s)
                chunk = self._next_chunk(kind.queue)
                if not chunk:
                    break
                self._send(worker, chunk, now)
                if not _has_room(worker):
                    free.remove(worker)

    def _next_chunk(self, queue: deque[_Call]) -> list[_Call]:
        """Take the next calls of one task from a queue, as many as fit a chunk."""
        chunk: list[_Call] = []
        expected_s = 0.0
        while queue and len(chunk) < _CHUNK_CALLS:
            call = queue[0]
            if call.state.cancelled:
                queue.popleft()
                continue
            expected_s += self._expected_of(call)
            if chunk and (call.state is not chunk[0].state or expected_s > _CHUNK_S):
                break
            chunk.append(queue.popleft())
        return chunk

    def _send(self, worker: _Worker, chunk: Sequence[_Call], now: float) -> None:
        task, places, calls = chunk[0].state.task, dict[int, int](), []
        for call in chunk:
            indices = tuple([places.setdefault(position, len(places)) for position in call.positions])
            calls.append((worker.serial, call.scorer, indices))
            expected_s = self._expected_of(call)
            worker.calls.append(_SentCall(call, worker.serial, expected_s, now))
            worker.expected_s += expected_s
            worker.serial += 1
        sent = [task.samples[position] for position in places]
        prompts: dict[int, int] = {}
        samples = tuple([(prompts.setdefault(one.prompt, len(prompts)), one.completion) for one in sent])
        media: tuple[PlacedMedia | None, ...] = ()
        buffers: tuple[SharedBuffer, ...] = ()
        if task.media and any(self._forms[call.scorer].media != "text" for call in chunk):
            media, buffers = _placed(task, sent)
        outputs: tuple[PlacedMedia, ...] = ()
        if task.outputs:
            outputs, buffers = _placed_outputs([task.outputs[position] for position in places], buffers)
        sent_prompts = tuple([task.prompts[one] for one in prompts])
        worker.process.send(CallChunk(sent_prompts, samples, tuple(calls), media, outputs, len(buffers)), buffers)
        if not worker.is_writing and not worker.process.flush():
            worker.is_writing = True
            self._selector.modify(worker.process, selectors.EVENT_READ | selectors.EVENT_WRITE, worker)


def columns_of(scorer: ScorerSettings, form: ScorerForm) -> tuple[int, ...]:
    """Return which of a scorer's keys its value is the sum of.

    Raises:
        ConfigError: the recipe names no key, and there are several, or one that is not there.
    """
    if not scorer.key and len(form.keys) == 1:
        return (0,)
    known = ", ".join(form.keys)
    if not scorer.key:
        raise ConfigError(
            f"Scorer {scorer.title!r} has several scores, {known}: set `key` to one of them, or to a sum."
        )
    for key in scorer.key.split("+"):
        if key not in form.keys:
            raise ConfigError(
                f"Scorer {scorer.title!r} has no score {key!r}: set `key` to one of {known}, or to a sum."
            )
    return tuple(form.keys.index(key) for key in scorer.key.split("+"))


def _divided(
    task: ScoreTask, positions: tuple[int, ...], form: ScorerForm, batch_size: int
) -> Iterator[tuple[int, ...]]:
    """Yield the indices of the samples of each call, of those at `positions`."""
    if form.scope == "pointwise":
        for begin in range(0, len(positions), batch_size):
            yield positions[begin : begin + batch_size]
        return
    groups: dict[int, list[int]] = {}
    for position in positions:
        groups.setdefault(task.samples[position].prompt, []).append(position)
    yield from map(tuple, groups.values())


def _placed(
    task: ScoreTask, samples: Sequence[Sample]
) -> tuple[tuple[PlacedMedia | None, ...], tuple[SharedBuffer, ...]]:
    """Return where the media of samples are, and the buffers that have them."""
    buffers: dict[SharedBuffer, int] = {}
    placed = list[PlacedMedia | None]()
    for sample in samples:
        if sample.media is None:
            placed.append(None)
            continue
        tensor = task.media[sample.media.tensor]
        assert isinstance(tensor.buffer, SharedBuffer)
        number = buffers.setdefault(tensor.buffer, len(buffers))
        placed.append(PlacedMedia(number, tensor.offset_of(sample.media.row), tensor.form))
    return tuple(placed), tuple(buffers)


def _raise(error: Exception) -> None:
    raise error


def _quarantined(kind: _Kind) -> str:
    """Return why a scorer of a kind scores nothing, as the end of a sentence."""
    return f"is quarantined, since no worker of it can be started: {kind.problem}"[:PROBLEM_CHARS]


def _placed_outputs(
    outputs: Sequence[MediaTensor], buffers: tuple[SharedBuffer, ...]
) -> tuple[tuple[PlacedMedia, ...], tuple[SharedBuffer, ...]]:
    """Return where the pixels of samples are to be written, and the buffers with those of the pixels after them."""
    numbers = {buffer: number for number, buffer in enumerate(buffers)}
    placed = list[PlacedMedia]()
    for tensor in outputs:
        assert isinstance(tensor.buffer, SharedBuffer)
        number = numbers.setdefault(tensor.buffer, len(numbers))
        placed.append(PlacedMedia(number, tensor.offset, tensor.form))
    return tuple(placed), tuple(numbers)


def _has_room(worker: _Worker) -> bool:
    return worker.expected_s < _CHUNK_S and len(worker.calls) <= _CHUNK_CALLS


def check_scorers(settings: RewardSettings, *, only_texts: bool = False) -> None:
    """Resolve every scorer in a worker process, as the service will. Raises ConfigError when one cannot be used.

    With `only_texts` no sample will have media, so that a scorer that reads some would fail each of them.

    A message that no worker sends is not an error of the recipe: the pool quarantines the scorer that sent it.
    """
    sandboxing = choose(settings.sandbox)
    for kind in kinds_of(settings):
        problem = _problem_of(kind, sandboxing, settings, only_texts=only_texts)
        if problem and len(kind.scorers) > 1:  # one of them may have spoken for another
            alone = (replace(kind, scorers=(spec,)) for spec in kind.scorers)
            found = (_problem_of(one, sandboxing, settings, only_texts=only_texts) for one in alone)
            problem = next(filter(None, found), "")
        if problem:
            raise ConfigError(problem)


def _problem_of(kind: WorkerKind, sandboxing: Sandboxing, settings: RewardSettings, *, only_texts: bool) -> str:
    """Return why the scorers of a kind cannot be used, in one sentence; empty if they can."""
    process = WorkerProcess(kind, sandboxing)
    try:
        return _await_ready(process, kind, settings, only_texts=only_texts)
    finally:
        process.end()


def _await_ready(process: WorkerProcess, kind: WorkerKind, settings: RewardSettings, *, only_texts: bool) -> str:
    timeout_s = settings.start_timeout_s
    deadline = time.monotonic() + timeout_s
    poller = select.poll()
    poller.register(process, select.POLLIN)
    while (left_s := deadline - time.monotonic()) > 0:
        poller.poll(left_s * 1000)
        process.flush()
        for message in process.receive():
            if isinstance(message, WorkerStartFailed):
                return message.problem
            if isinstance(message, WorkerReady):
                return _problem_of_forms(message.forms, kind, settings, only_texts=only_texts)
        if process.ended:
            exit = process.exit_description()
            if exit.cause == "memory":
                return f"Importing the scorers exceeded their {exit.text}: raise memory_mb."
            return f"Importing the scorers ended their process ({exit.text})."
    return (
        f"Importing the scorers took longer than {timeout_s:g} s: make their modules import faster, or raise "
        "start_timeout_s."
    )


def _problem_of_forms(
    forms: Iterable[tuple[int, ScorerForm]], kind: WorkerKind, settings: RewardSettings, *, only_texts: bool
) -> str:
    known = {spec.index for spec in kind.scorers}
    try:
        for scorer, form in forms:
            if scorer in known:  # others are a scorer's, in the worker's name
                columns_of(settings.scorers[scorer], form)
                if only_texts:
                    _check_reads_texts(settings.scorers[scorer], form)
    except ConfigError as error:
        return str(error)
    return ""


def _check_reads_texts(scorer: ScorerSettings, form: ScorerForm) -> None:
    """Raise ConfigError when a scorer could not score any completion of a run."""
    if form.media != "text" and scorer.weight and not scorer.tasks:
        raise ConfigError(
            f"Scorer {scorer.title!r} reads {form.media}, and the completions of a run are texts: serve it over HTTP "
            "(`reward.http.enabled`), or remove it."
        )
