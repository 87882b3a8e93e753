"""Tasks in hand by their ids, and what has come of them: scores, and calls that were given up."""

from __future__ import annotations

from collections.abc import Sequence

from starling.common.wire.messages import Status
from starling.reward.core.media import MediaTensor
from starling.reward.core.samples import LostCall, Score, ScoreTask
from starling.reward.score.pool.call import Call, TaskState


class TaskTable:
    """Tasks that are being scored, with the scores and lost calls that have not been taken yet.

    Args:
        titles: of the scorers, for problems.
        what: the scorers are called in problems.
    """

    def __init__(self, titles: Sequence[str], what: str) -> None:
        self._titles, self._what = titles, what
        self._states: dict[str, TaskState] = {}
        self._scores: list[Score] = []
        self._lost: list[LostCall] = []

    def __len__(self) -> int:
        return len(self._states)

    @property
    def num_left(self) -> int:
        """Scores to come, of all tasks."""
        return sum(state.num_left for state in self._states.values())

    @property
    def has_scores(self) -> bool:
        """Whether there are scores to take."""
        return bool(self._scores)

    def add(self, task: ScoreTask) -> TaskState:
        """Note a task; one without samples or scorers is done at once. Raises ValueError when its id is in use."""
        if task.id in self._states:
            raise ValueError(f"task {task.id!r} is being scored already")
        state = TaskState(task, len(task.samples) * len(task.scorers))
        if state.num_left:
            self._states[task.id] = state
        return state

    def cancel(self, task_id: str) -> int:
        """Forget a task, whose further scores are dropped; returns how many were to come, 0 without such a task."""
        state = self._states.pop(task_id, None)
        if state is None:
            return 0
        state.is_cancelled = True
        return state.num_left

    def settle(
        self,
        call: Call,
        position: int,
        value: float | None,
        status: Status = Status.OK,
        problem: str = "",
        parts: tuple[tuple[str, float | None], ...] = (),
    ) -> None:
        """Note the score of one sample of a call.

        Args:
            call: of which it is.
            position: index of the sample in the task.
            value: the score; None if it failed.
            status: of the score.
            problem: why it failed, as the end of a sentence about the scorer, without its full stop.
            parts: all scores by key, where the scorer names them.
        """
        state = call.state
        if state.is_cancelled:
            return
        state.num_left -= 1
        if not state.num_left:
            del self._states[state.task.id]
        index = state.task.samples[position].index
        sentence = self._sentence(call, problem) if problem else ""
        self._scores.append(Score(state.task.id, index, call.scorer, value, status, sentence, parts))

    def fail(self, call: Call, status: Status, problem: str) -> None:
        """Note that no sample of a call has a score; `problem` as for `settle`."""
        for position in call.positions:
            self.settle(call, position, None, status, problem)

    def give_up(self, call: Call, status: Status, problem: str, *, reads_media: bool) -> None:
        """Fail a call that ended its worker, or exceeded the limit, at every try, and keep it for `take_lost`."""
        self.fail(call, status, problem)
        task, samples = call.state.task, call.samples
        media: tuple[tuple[MediaTensor, int], ...] = ()
        if reads_media:
            media = tuple((task.media[one.media.tensor], one.media.row) for one in samples if one.media is not None)
        completions = tuple(sample.completion for sample in samples)
        prompt = task.prompts[samples[0].prompt]
        self._lost.append(LostCall(call.scorer, prompt, completions, self._sentence(call, problem), media))

    def take_scores(self) -> list[Score]:
        """Return the scores since the last time."""
        scores, self._scores = self._scores, []
        return scores

    def take_lost(self) -> list[LostCall]:
        """Return the calls that were given up since the last time."""
        lost, self._lost = self._lost, []
        return lost

    def clear(self) -> None:
        """Forget all tasks."""
        self._states.clear()

    def _sentence(self, call: Call, problem: str) -> str:
        return f"{self._what} {self._titles[call.scorer]!r} {problem}."
