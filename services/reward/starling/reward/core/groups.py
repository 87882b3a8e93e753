"""From scores to rewards: the groups that this service holds, as a pure machine.

    ScoreGroup --add--> queued --slot free--> working --last score recorded--> answered

`add`, `record` and `give_up` return the commands that now follow. The reward of a trajectory is the sum of its
scores, each times its scorer's weight. A trajectory that arrives with an unusable status is not scored and keeps that
status. A trajectory one of whose *needed* scores (weight other than 0) failed has no reward: it gets the status of the
failure, never a reward of 0. A scorer of weight 0 is only observed: its failure is told but costs no reward.
A scorer that is for other prompts adds nothing, and its score is null; a prompt that is no scorer's has no reward.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from starling.common.wire.messages import TRAINABLE_STATUSES, CompletionText, GroupScored, Prompt, ScoreGroup, Status

TASK = "task"
"""Key of a prompt's metadata by which scorers of some prompts alone know theirs."""


@dataclass(frozen=True, slots=True)
class WeightedScorer:
    """One column of every group: the scorer's name in metrics, and its share of the reward."""

    label: str
    weight: float
    tasks: tuple[str, ...] = ()
    """It scores the prompts of these tasks alone; empty for those of all."""

    def scores(self, prompt: Prompt) -> bool:
        """Say whether it scores the completions of `prompt`."""
        return not self.tasks or prompt.metadata.get(TASK) in self.tasks


@dataclass(frozen=True, slots=True)
class ScoreTask:
    """The completions of one group that are to be scored, by every scorer."""

    id: str
    """The lease."""
    completions: tuple[tuple[int, CompletionText], ...]
    """Position in the group of each completion to score, and what a scorer is told of it."""
    reference: str
    prompt_text: str
    metadata: dict[str, Any]
    scorers: tuple[int, ...]
    """Positions in the settings of those that are to score them."""


class Score(NamedTuple):
    """What one scorer said of one completion."""

    task: str
    completion: int
    """Position of the completion in its group."""
    scorer: int
    """Position of the scorer in the settings."""
    value: float | None
    """The unweighted score, finite; None when there is none."""
    status: Status = Status.OK
    """`reward_error` or `reward_timeout` where `value` is None."""
    problem: str = ""
    """One sentence on the failure."""


@dataclass(frozen=True, slots=True)
class SubmitTask:
    """Have this task scored."""

    task: ScoreTask


@dataclass(frozen=True, slots=True)
class CancelTask:
    """Give up the task of this lease: nobody waits for it."""

    lease: str


@dataclass(frozen=True, slots=True)
class SendScores:
    """Tell the controller."""

    message: GroupScored


Command = SubmitTask | CancelTask | SendScores


@dataclass(slots=True)
class _Group:
    message: ScoreGroup
    task: ScoreTask
    scores: list[list[Score | None]]
    """[scorer][completion]; None while the score is outstanding or not wanted."""
    num_missing: int


@dataclass
class GroupScores:
    """The groups of one reward replica. At most `num_slots` of them are worked on at a time; others queue."""

    scorers: tuple[WeightedScorer, ...]
    num_slots: int
    _groups: dict[str, _Group] = field(default_factory=dict)
    _queue: deque[str] = field(default_factory=deque)

    @property
    def working(self) -> frozenset[str]:
        """Return the leases that are being scored."""
        return frozenset(self._groups.keys() - set(self._queue))

    @property
    def queued(self) -> tuple[str, ...]:
        """Return the leases that wait for a slot."""
        return tuple(self._queue)

    def add(self, message: ScoreGroup) -> list[Command]:
        """Take a group; its lease is one that was not held before."""
        task = _task_of(message, self.scorers)
        num_completions = len(message.completions)
        scores: list[list[Score | None]] = [[None] * num_completions for _ in self.scorers]
        group = _Group(message, task, scores, num_missing=len(task.completions) * len(task.scorers))
        if not group.num_missing:
            return [SendScores(_scored(group, self.scorers))]
        self._groups[message.lease] = group
        self._queue.append(message.lease)
        return self._fill_slots()

    def record(self, score: Score) -> list[Command]:
        """Take one score. One for a group that is not held any more, or that is known already, changes nothing."""
        group = self._groups.get(score.task)
        if group is None or group.scores[score.scorer][score.completion] is not None:
            return []
        group.scores[score.scorer][score.completion] = score
        group.num_missing -= 1
        if group.num_missing:
            return []
        del self._groups[score.task]
        return [SendScores(_scored(group, self.scorers)), *self._fill_slots()]

    def give_up(self, leases: tuple[str, ...]) -> list[Command]:
        """Forget leases that nobody waits for."""
        commands: list[Command] = []
        for lease in leases:
            if self._groups.pop(lease, None) is None:
                continue
            if lease in self._queue:
                self._queue.remove(lease)
            else:
                commands.append(CancelTask(lease))
        return commands + self._fill_slots()

    def _fill_slots(self) -> list[Command]:
        commands: list[Command] = []
        while self._queue and len(self._groups) - len(self._queue) < self.num_slots:
            commands.append(SubmitTask(self._groups[self._queue.popleft()].task))
        return commands


def prompt_text(prompt: Prompt) -> str:
    """Return the prompt as a scorer reads it: its text, or its messages' contents parted by blank lines."""
    if not prompt.messages:
        return prompt.text
    return "\n\n".join(message.content for message in prompt.messages)


def _task_of(message: ScoreGroup, scorers: tuple[WeightedScorer, ...]) -> ScoreTask:
    usable = [(i, item) for i, item in enumerate(message.completions) if item.status in TRAINABLE_STATUSES]
    prompt = message.prompt
    wanted = tuple(index for index, scorer in enumerate(scorers) if scorer.scores(prompt))
    return ScoreTask(message.lease, tuple(usable), prompt.reference, prompt_text(prompt), prompt.metadata, wanted)


def _scored(group: _Group, scorers: tuple[WeightedScorer, ...]) -> GroupScored:
    rewards: list[float | None] = []
    statuses: list[Status] = []
    problems: list[str] = []
    for index, completion in enumerate(group.message.completions):
        column = [row[index] for row in group.scores]
        problems += [f"Completion {index}: {score.problem}" for score in column if score and score.problem]
        reward, status = None, completion.status
        if status in TRAINABLE_STATUSES:
            reward, failure = _reward(column, scorers)
            status = failure or status
            if not any(column):
                problems.append(f"Completion {index}: no scorer is for this prompt; name its task in one of them.")
            elif failure and not any(score and score.problem for score in column):
                problems.append(f"Completion {index}: the weighted sum of its scores is too large for a float.")
        rewards.append(reward)
        statuses.append(status)
    return GroupScored(
        lease=group.message.lease,
        rewards=tuple(rewards),
        statuses=tuple(statuses),
        components={
            scorer.label: tuple(score.value if score else None for score in row)
            for scorer, row in zip(scorers, group.scores, strict=True)
        },
        problems=tuple(problems),
    )


def _reward(column: list[Score | None], scorers: tuple[WeightedScorer, ...]) -> tuple[float | None, Status | None]:
    """Return the weighted sum of one completion's scores, or None and the status of the first needed failure."""
    terms = []
    if not any(column):
        return None, Status.REWARD_ERROR
    for score, scorer in zip(column, scorers, strict=True):
        if score is None or not scorer.weight:  # a score that is wanted is there: only then is a group answered
            continue
        if score.value is None:
            return None, score.status
        terms.append(scorer.weight * score.value)
    try:
        total = math.fsum(terms)
    except (OverflowError, ValueError):  # a partial sum overflows, or terms of both infinities meet
        return None, Status.REWARD_ERROR
    return (total, None) if math.isfinite(total) else (None, Status.REWARD_ERROR)
