"""State machine of a reward replica: groups in progress, from scores to rewards. Pure.

    ScoreGroup --add--> queued --slot free--> working --last score recorded--> answered
               --fail--> answered

`add`, `fail`, `record` and `cancel` return the commands that follow. The reward of a trajectory is the weighted sum of
its scores; each of them and the sum may have bounds. A trajectory that arrives with a status that cannot be trained is
not scored and keeps its status. A scorer for other prompts adds nothing, and its score is null; a prompt without any
scorer has no reward.

A group whose needed score has timed out is answered at once: the controller uses no group with a failure, and texts
that are made to hang the scorer would take the time limit of each completion. Likewise a group waits no more for its
evaluation scores once one of them has timed out.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from starling.common.counts import counted
from starling.common.wire.messages import TRAINABLE_STATUSES, GroupScored, Prompt, ScoreGroup, Status
from starling.reward.core.media import MediaRow, MediaTensor
from starling.reward.core.rewards import NO_BOUNDS, RewardBounds, WeightedScorer, bounded, combine, components
from starling.reward.core.samples import PromptText, Sample, Score, ScoreTask


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
    num_unevaluated: int = 0
    """Those of the missing scores that are only for evaluation."""
    evaluation_is_late: bool = False
    """An evaluation score has timed out."""


@dataclass
class GroupScores:
    """The groups of one reward replica. At most `num_slots` are scored at a time; others queue."""

    scorers: tuple[WeightedScorer, ...]
    num_slots: int
    bounds: RewardBounds = NO_BOUNDS
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

    def add(self, message: ScoreGroup, latents: MediaTensor | None = None) -> list[Command]:
        """Add a group under a new lease. `latents`: those of its completions, one row each; None without media."""
        task = _task_of(message, self.scorers, latents)
        num_completions = len(message.completions)
        scores: list[list[Score | None]] = [[None] * num_completions for _ in self.scorers]
        num, evaluating = len(task.samples), sum(self.scorers[scorer].evaluates for scorer in task.scorers)
        group = _GroupInProgress(message, task, scores, num * len(task.scorers), num * evaluating)
        if not group.num_missing:
            return [SendScores(_scored(group, self.scorers, self.bounds))]
        self._groups[message.lease] = group
        self._queue.append(message.lease)
        return self._fill_slots()

    def fail(self, message: ScoreGroup, status: Status, problem: str) -> list[Command]:
        """Answer a group that cannot be scored: each completion that could be trained has `status`, and no reward.

        `problem`: a sentence.
        """
        whose = [one.status if one.status not in TRAINABLE_STATUSES else status for one in message.completions]
        nothing: tuple[float | None, ...] = (None,) * len(whose)
        answer = GroupScored(lease=message.lease, rewards=nothing, statuses=tuple(whose), problems=(problem,))
        return [SendScores(answer)]

    def record(self, score: Score) -> list[Command]:
        """Record one score. A score of an unknown group, or one that is recorded already, changes nothing."""
        group = self._groups.get(score.task)
        if group is None or group.scores[score.scorer][score.completion] is not None:
            return []
        group.scores[score.scorer][score.completion] = score
        scorer, is_late = self.scorers[score.scorer], score.status is Status.REWARD_TIMEOUT
        group.num_missing -= 1
        group.num_unevaluated -= scorer.evaluates
        group.evaluation_is_late |= is_late and scorer.evaluates
        is_lost = is_late and bool(scorer.weight)
        is_complete = group.num_missing == (group.num_unevaluated if group.evaluation_is_late else 0)
        if not is_complete and not is_lost:
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


def scored_by(message: ScoreGroup, scorers: tuple[WeightedScorer, ...]) -> tuple[int, ...]:
    """Return the indices of the scorers that score the completions of a group."""
    wanted = ((index, scorer) for index, scorer in enumerate(scorers) if message.evaluate or not scorer.evaluates)
    return tuple(index for index, scorer in wanted if scorer.scores(message.prompt.metadata))


def _task_of(message: ScoreGroup, scorers: tuple[WeightedScorer, ...], latents: MediaTensor | None) -> ScoreTask:
    samples = tuple(
        Sample(index, 0, completion, None if latents is None else MediaRow(0, index))
        for index, completion in enumerate(message.completions)
        if completion.status in TRAINABLE_STATUSES
    )
    prompt = PromptText(prompt_text(message.prompt), message.prompt.reference, message.prompt.metadata)
    media = () if latents is None else (latents,)
    return ScoreTask(message.lease, (prompt,), samples, scored_by(message, scorers), media)


def _scored(group: _GroupInProgress, scorers: tuple[WeightedScorer, ...], bounds: RewardBounds) -> GroupScored:
    rewards: list[float | None] = []
    statuses: list[Status] = []
    problems: dict[str, list[int]] = {}
    """The completions that have each problem, in the order of the first."""
    for index, completion in enumerate(group.message.completions):
        if completion.status not in TRAINABLE_STATUSES:
            rewards.append(None)
            statuses.append(completion.status)
            continue
        column = [row[index] for row in group.scores]
        found = combine(column, scorers, bounds, wanted=group.task.scorers, status=completion.status)
        for problem in found.problems:
            problems.setdefault(problem, []).append(index)
        rewards.append(found.reward)
        statuses.append(found.status)
    evaluated = components(scorers, group.scores, evaluates=True) if group.message.evaluate else {}
    return GroupScored(
        lease=group.message.lease,
        rewards=tuple(rewards),
        statuses=tuple(statuses),
        components=bounded(components(scorers, group.scores), scorers),
        evaluation_scores=bounded(evaluated, scorers),
        problems=tuple(_problem(text, indices, len(rewards)) for text, indices in problems.items()),
    )


def _problem(text: str, completions: list[int], num_completions: int) -> str:
    """Return what is wrong with some completions of a group of `num_completions`, in one sentence."""
    if len(completions) == 1:
        return f"Completion {completions[0]}: {text}"
    who = "All" if len(completions) == num_completions else f"{len(completions)} of"
    return f"{who} {counted(num_completions, 'completion')}: {text}"
