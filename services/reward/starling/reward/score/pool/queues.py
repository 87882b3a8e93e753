"""Queues of calls: division of samples into calls, whose sizes follow from forms and durations, and calls that return.

A call returns to the head of its queue when its worker has ended before it began, or when it is to be tried again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from starling.common.wire.messages import Status
from starling.reward.score.pool.call import Call, UndividedSamples
from starling.reward.score.pool.chunks import next_calls
from starling.reward.score.pool.divide import divided, scorable
from starling.reward.score.pool.durations import CallDurations
from starling.reward.score.pool.forms import ScorerForms
from starling.reward.score.pool.kinds import KindState, KindTable
from starling.reward.score.pool.tasks import TaskTable
from starling.reward.score.scorers.batch import ScorerForm
from starling.reward.settings import ScorerSettings


class CallQueues:
    """Calls that wait for a worker of their scorer's kind, and samples that wait for its form.

    Args:
        scorers: of the pool.
        kinds: with a queue each.
        forms: of the scorers, as far as they are known.
        tasks: where samples fail that no call can be made for.
    """

    def __init__(
        self, scorers: Sequence[ScorerSettings], kinds: KindTable, forms: ScorerForms, tasks: TaskTable
    ) -> None:
        self._scorers, self._kinds, self._forms, self._tasks = scorers, kinds, forms, tasks
        self._durations = CallDurations(len(scorers))
        self._undivided: list[UndividedSamples] = []
        self._num_cancelled = 0
        """At most so many of the queued calls are of cancelled tasks."""

    def __len__(self) -> int:
        return sum(len(kind.queue) for kind in self._kinds) + len(self._undivided)

    def add(self, samples: UndividedSamples) -> None:
        """Queue the calls of samples, when the form of the scorer is known; fail them if the scorer is quarantined."""
        state, scorer, positions = samples
        kind, form = self._kinds.of(scorer), self._forms.get(scorer)
        if kind.problem:
            self._tasks.fail(Call(state, scorer, positions), Status.REWARD_ERROR, kind.quarantine)
            return
        if form is None:
            self._undivided.append(samples)
            return
        able, problems = scorable(samples, form)
        for position, problem in problems.items():
            self._tasks.fail(Call(state, scorer, (position,)), Status.REWARD_ERROR, problem)
        for some in divided(state.task, able, form, self._batch_size(scorer, form)):
            kind.queue.append(Call(state, scorer, some))

    def divide_waiting(self) -> None:
        """Queue the calls of samples that have waited for forms that are known now."""
        waiting, self._undivided = self._undivided, []
        self._add_all(waiting)

    def take_chunk(self, kind: KindState) -> list[Call]:
        """Return the next calls for one worker, of one task; empty if there are none."""
        return next_calls(kind.queue, self.expected_s)

    def expected_s(self, call: Call) -> float:
        """Return the expected seconds of a call."""
        return self._durations.expected_s(call, self._forms[call.scorer])

    def record_duration(self, call: Call, seconds: float) -> None:
        """Note how long a call has taken."""
        self._durations.record(call, self._forms[call.scorer], seconds)

    def put_back(self, calls: Sequence[Call]) -> None:
        """Return calls to the heads of their queues, in their order.

        If their kind of workers has been split since they were sent, their samples wait for the new form of the scorer.
        """
        for call in reversed(calls):
            if self._forms.get(call.scorer) is None:
                self.add(UndividedSamples(call.state, call.scorer, call.positions))
            else:
                self._kinds.of(call.scorer).queue.appendleft(call)

    def put_back_divided(self, call: Call) -> bool:
        """Return the samples of a failed batch one by one; returns False if it is no batch, or they belong together.

        Where the form of the scorer is no longer known, one sample is returned, too.
        """
        form = self._forms.get(call.scorer)
        if form is not None and (len(call.positions) == 1 or form.scope == "groupwise"):
            return False
        self.put_back([call] if form is None else [call._replace(positions=(position,)) for position in call.positions])
        return True

    def undivide(self, kind: KindState) -> None:
        """Let the samples of a kind's calls wait for new forms of their scorers."""
        waiting: dict[tuple[int, int], UndividedSamples] = {}
        for call in kind.queue:
            key = (id(call.state), call.scorer)
            positions = waiting[key].positions if key in waiting else ()
            waiting[key] = UndividedSamples(call.state, call.scorer, (*positions, *call.positions))
        kind.queue.clear()
        self._undivided += [one._replace(positions=tuple(sorted(one.positions))) for one in waiting.values()]

    def fail_all(self, kind: KindState) -> None:
        """Fail all that waits for a kind of workers whose scorer is quarantined."""
        scorers = {spec.index for spec in kind.workers.scorers}
        waiting = [UndividedSamples(call.state, call.scorer, call.positions) for call in kind.queue]
        waiting += [samples for samples in self._undivided if samples.scorer in scorers]
        self._undivided = [samples for samples in self._undivided if samples.scorer not in scorers]
        kind.queue.clear()
        self._add_all(waiting)

    def drop_cancelled(self, num_calls: int) -> None:
        """Drop calls of cancelled tasks, when these could be most of the queued ones; they would wait for a worker.

        Args:
            num_calls: at most so many are of a task that has been cancelled now.
        """
        self._num_cancelled += num_calls
        if 2 * self._num_cancelled <= len(self):
            return
        self._num_cancelled = 0
        for kind in self._kinds:
            alive = [call for call in kind.queue if not call.state.is_cancelled]
            kind.queue.clear()
            kind.queue.extend(alive)
        self._undivided = [samples for samples in self._undivided if not samples.state.is_cancelled]

    def clear(self) -> None:
        """Forget all calls."""
        self._undivided.clear()
        for kind in self._kinds:
            kind.queue.clear()

    def _add_all(self, waiting: Iterable[UndividedSamples]) -> None:
        for samples in waiting:
            if not samples.state.is_cancelled:
                self.add(samples)

    def _batch_size(self, scorer: int, form: ScorerForm) -> int:
        """Return how many completions a call of a scorer may have."""
        if form.is_function:
            return self._durations.short_batch(scorer)
        return self._scorers[scorer].batch_size or form.batch_size
