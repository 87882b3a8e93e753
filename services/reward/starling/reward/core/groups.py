"""State machine of a reward replica: groups in progress, from scores to rewards. Pure.

    ScoreGroup --add--> queued --slot free--> working --last score recorded--> answered

`add`, `record` and `cancel` return the commands that follow. The reward of a trajectory is the weighted sum of its
scores; each of them and the sum may have bounds. A trajectory that arrives with a status that cannot be trained is not
scored and keeps its status. If a *needed* score (of weight other than 0) fails, the trajectory has no reward but the
status of the failure, never a reward of 0. A scorer of weight 0 is only observed: its failure is reported but costs no
reward. A scorer for other prompts adds nothing, and its score is null; a prompt without any scorer has no reward.

A group whose needed score has timed out is answered at once: the controller uses no group with a failure, and texts
that are made to hang the scorer would take the time limit of each completion.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from starling.common.counts import counted
from starling.common.wire.messages import TRAINABLE_STATUSES, GroupScored, Prompt, ScoreGroup, Status
from starling.reward.core.samples import PromptText, Score, ScoreTask, group_task

TASK = "task"
"""Key of the task in a prompt's metadata, for scorers of certain tasks."""


@dataclass(frozen=True, slots=True)
class WeightedScorer:
    """One column of every group: the scorer's name in metrics, and its share of the reward."""

    label: str
    weight: float
    tasks: tuple[str, ...] = ()
    """Tasks whose prompts it scores; empty for all prompts."""
    clip_min: float = -math.inf
    clip_max: float = math.inf
    """Bounds of the score in the reward; metrics have the score itself."""

    def scores(self, prompt: Prompt) -> bool:
        """Whether it scores the completions of `prompt`."""
        return not self.tasks or prompt.metadata.get(TASK) in self.tasks


@dataclass(frozen=True, slots=True)
class RewardBounds:
    """How the weighted sum of the scores becomes the reward."""

    clip_min: float = -math.inf
    clip_max: float = math.inf
    scale: float = 1.0
    """Factor after the bounds."""


@dataclass(frozen=True, slots=True)
class SubmitTask:
    """Start to score this task."""

    task: ScoreTask


@dataclass(frozen=True, slots=True)
class CancelTask:
    """Stop scoring the task of this lease."""

    lease: str


@dataclass(frozen=True, slots=True)
class SendScores:
    """Send the rewards of a group to the controller."""

    message: GroupScored


Command = SubmitTask | CancelTask | SendScores


@dataclass(slots=True)
class _GroupInProgress:
    message: ScoreGroup
    task: ScoreTask
    scores: list[list[Score | None]]
    """[scorer][completion]; None while a score is outstanding, or where none is needed."""
    num_missing: int


@dataclass
class GroupScores:
    """The groups of one reward replica. At most `num_slots` are scored at a time; others queue."""

    scorers: tuple[WeightedScorer, ...]
    num_slots: int
    bounds: RewardBounds = RewardBounds()
    _groups: dict[str, _GroupInProgress] = field(default_factory=dict)
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
        """Add a group under a new lease."""
        task = _task_of(message, self.scorers)
        num_completions = len(message.completions)
        scores: list[list[Score | None]] = [[None] * num_completions for _ in self.scorers]
        group = _GroupInProgress(message, task, scores, num_missing=len(task.samples) * len(task.scorers))
        if not group.num_missing:
            return [SendScores(_scored(group, self.scorers, self.bounds))]
        self._groups[message.lease] = group
        self._queue.append(message.lease)
        return self._fill_slots()

    def record(self, score: Score) -> list[Command]:
        """Record one score. A score of an unknown group, or one that is recorded already, changes nothing."""
        group = self._groups.get(score.task)
        if group is None or group.scores[score.scorer][score.completion] is not None:
            return []
        group.scores[score.scorer][score.completion] = score
        group.num_missing -= 1
        is_lost = score.status is Status.REWARD_TIMEOUT and bool(self.scorers[score.scorer].weight)
        if group.num_missing and not is_lost:
            return []
        del self._groups[score.task]
        unfinished: list[Command] = [CancelTask(score.task)] if group.num_missing else []
        return [*unfinished, SendScores(_scored(group, self.scorers, self.bounds)), *self._fill_slots()]

    def cancel(self, leases: tuple[str, ...]) -> list[Command]:
        """Drop the groups of cancelled leases."""
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
    """Return the prompt's text, or its messages' contents separated by blank lines."""
    if not prompt.messages:
        return prompt.text
    return "\n\n".join(message.content for message in prompt.messages)


def _task_of(message: ScoreGroup, scorers: tuple[WeightedScorer, ...]) -> ScoreTask:
    trainable = ((i, item) for i, item in enumerate(message.completions) if item.status in TRAINABLE_STATUSES)
    prompt = PromptText(prompt_text(message.prompt), message.prompt.reference, message.prompt.metadata)
    scored_by = tuple(index for index, scorer in enumerate(scorers) if scorer.scores(message.prompt))
    return group_task(message.lease, trainable, prompt, scored_by)


def _scored(group: _GroupInProgress, scorers: tuple[WeightedScorer, ...], bounds: RewardBounds) -> GroupScored:
    rewards: list[float | None] = []
    statuses: list[Status] = []
    problems: dict[str, list[int]] = {}
    """The completions that have each problem, in the order of the first."""
    for index, completion in enumerate(group.message.completions):
        column = [row[index] for row in group.scores]
        own = [score.problem for score in column if score and score.problem]
        reward, status = None, completion.status
        if status in TRAINABLE_STATUSES and any(column[scorer] is None for scorer in group.task.scorers):
            failed = [score.status for score in column if score and score.value is None]
            status = next(iter(failed), Status.REWARD_TIMEOUT)
        elif status in TRAINABLE_STATUSES:
            reward, failure = _reward(column, scorers, bounds)
            status = failure or status
            if not any(column):
                own = ["no scorer is for this prompt; name its task in one of them."]
            elif failure and not own:
                own = ["the weighted sum of its scores is too large for a float."]
        for problem in dict.fromkeys(own):
            problems.setdefault(problem, []).append(index)
        rewards.append(reward)
        statuses.append(status)
    return GroupScored(
        lease=group.message.lease,
        rewards=tuple(rewards),
        statuses=tuple(statuses),
        components=_components(group, scorers),
        problems=tuple(_problem(text, indices, len(rewards)) for text, indices in problems.items()),
    )


def _components(group: _GroupInProgress, scorers: tuple[WeightedScorer, ...]) -> dict[str, tuple[float | None, ...]]:
    """Return the scores of a group by the scorers' labels, followed by ``label/key`` of those with several scores."""
    found: dict[str, tuple[float | None, ...]] = {}
    for scorer, row in zip(scorers, group.scores, strict=True):
        found[scorer.label] = tuple(score.value if score else None for score in row)
        parts = [dict(score.parts) if score else {} for score in row]
        for key in dict.fromkeys(key for own in parts for key in own):
            found[f"{scorer.label}/{key}"] = tuple(own.get(key) for own in parts)
    return found


def _problem(text: str, completions: list[int], num_completions: int) -> str:
    """Return what is wrong with some completions of a group of `num_completions`, in one sentence."""
    if len(completions) == 1:
        return f"Completion {completions[0]}: {text}"
    who = "All" if len(completions) == num_completions else f"{len(completions)} of"
    return f"{who} {counted(num_completions, 'completion')}: {text}"


def _reward(
    column: list[Score | None], scorers: tuple[WeightedScorer, ...], bounds: RewardBounds
) -> tuple[float | None, Status | None]:
    """Return the bounded sum of one completion's scores, or None and the status of the first needed failure."""
    terms = []
    if not any(column):
        return None, Status.REWARD_ERROR
    for score, scorer in zip(column, scorers, strict=True):
        if score is None or not scorer.weight:  # None only where the scorer is not for this prompt
            continue
        if score.value is None:
            return None, score.status
        terms.append(scorer.weight * min(max(score.value, scorer.clip_min), scorer.clip_max))
    try:
        total = bounds.scale * min(max(math.fsum(terms), bounds.clip_min), bounds.clip_max)
    except (OverflowError, ValueError):  # a partial sum overflows, or terms of both infinities meet
        return None, Status.REWARD_ERROR
    return (total, None) if math.isfinite(total) else (None, Status.REWARD_ERROR)
