"""Queues of calls when a kind of workers is split, while a worker of it is being ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from starling.common.wire.messages import CompletionText, Status
from starling.reward.core.samples import PromptText, group_task
from starling.reward.score.pool.call import UndividedSamples
from starling.reward.score.pool.forms import ScorerForms
from starling.reward.score.pool.kinds import KindTable
from starling.reward.score.pool.queues import CallQueues
from starling.reward.score.pool.tasks import TaskTable
from starling.reward.score.scorers.batch import ScorerForm
from starling.reward.score.workers.kinds import kinds_of
from starling.reward.score.workers.protocol import WorkerReady
from starling.reward.settings import RewardSettings

SETTINGS = RewardSettings.model_validate({"scorers": [{"name": "length"}, {"name": "format"}]})
FORM = ScorerForm(batch_size=3)
POSITIONS = (0, 1, 2)


class Parts(NamedTuple):
    """Parts of a pool without workers."""

    kinds: KindTable
    forms: ScorerForms
    tasks: TaskTable
    queues: CallQueues

    def split(self) -> None:
        """Give both scorers workers of their own, as after failed starts."""
        (kind,) = self.kinds
        self.kinds.split(kind)
        for scorer in (0, 1):
            self.forms.forget(scorer)
        self.queues.undivide(kind)

    def scored_positions(self, scorer: int) -> list[int]:
        """Return the positions of all calls of a scorer, after its own worker has said how it is called."""
        assert not self.forms.learn({scorer}, WorkerReady(((scorer, FORM),)))
        self.queues.divide_waiting()
        found: list[int] = []
        while calls := self.queues.take_chunk(self.kinds.of(scorer)):
            assert {call.scorer for call in calls} == {scorer}
            found += [position for call in calls for position in call.positions]
        return found


@contextmanager
def parts_with_a_task() -> Iterator[Parts]:
    """Both scorers share workers, and have a batch each of one task in their queue."""
    kinds, forms = KindTable(kinds_of(SETTINGS)), ScorerForms(SETTINGS.scorers)
    tasks = TaskTable([scorer.title for scorer in SETTINGS.scorers], "scorer")
    queues = CallQueues(SETTINGS.scorers, kinds, forms, tasks)
    completions = [CompletionText(text="a", status=Status.OK, num_tokens=1)] * len(POSITIONS)
    assert not forms.learn({0, 1}, WorkerReady(((0, FORM), (1, FORM))))
    state = tasks.add(group_task("t", enumerate(completions), PromptText("", "", {}), (0, 1)))
    for scorer in (0, 1):
        queues.add(UndividedSamples(state, scorer, POSITIONS))
    try:
        yield Parts(kinds, forms, tasks, queues)
    finally:
        for kind in kinds:
            kind.keeper.close()


def test_queued_calls_are_divided_anew_when_their_kind_is_split() -> None:
    with parts_with_a_task() as parts:
        parts.split()
        assert [parts.scored_positions(scorer) for scorer in (0, 1)] == [[*POSITIONS]] * 2


def test_calls_that_return_after_their_kind_was_split_are_divided_anew() -> None:
    """The end of a worker takes a while, in which the starts of others of its kind may have failed too often."""
    with parts_with_a_task() as parts:
        (kind,) = parts.kinds
        sent = parts.queues.take_chunk(kind) + parts.queues.take_chunk(kind)
        assert [call.scorer for call in sent] == [0, 1]
        parts.split()
        parts.queues.put_back(sent)
        assert [parts.scored_positions(scorer) for scorer in (0, 1)] == [[*POSITIONS]] * 2


def test_batch_that_failed_and_returns_after_its_kind_was_split_is_scored_again() -> None:
    with parts_with_a_task() as parts:
        (kind,) = parts.kinds
        sent = parts.queues.take_chunk(kind) + parts.queues.take_chunk(kind)
        parts.split()
        assert all(parts.queues.put_back_divided(call) for call in sent)
        assert [parts.scored_positions(scorer) for scorer in (0, 1)] == [[*POSITIONS]] * 2


def test_calls_return_to_the_head_of_their_queue_in_their_order() -> None:
    with parts_with_a_task() as parts:
        (kind,) = parts.kinds
        sent = parts.queues.take_chunk(kind) + parts.queues.take_chunk(kind)
        parts.queues.put_back(sent)
        assert list(kind.queue) == sent
