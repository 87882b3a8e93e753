"""State machine of the requests of HTTP clients: from samples of any prompts to their rewards. Pure.

    add --> scoring --last score recorded, or deadline--> answered

Each sample has its own outcome: one that fails, or is not scored in time, has the status and the reason, and the others
their rewards. `add`, `record`, `expire` and `cancel` return the commands that follow.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import NamedTuple

from starling.common.counts import counted
from starling.common.wire.messages import Status
from starling.reward.core.groups import CancelTask, SubmitTask
from starling.reward.core.media import Input, MediaForm, MediaTensor, lacks
from starling.reward.core.rewards import CombinedScores, RewardBounds, WeightedScorer, combine, components
from starling.reward.core.samples import PromptText, Sample, Score, ScoreTask


@dataclass(frozen=True, slots=True)
class RewardRequest:
    """Samples of a client."""

    id: str
    prompts: tuple[PromptText, ...]
    samples: tuple[Sample, ...]
    """Their indices count from 0; those of one prompt are a group."""
    only: tuple[int, ...] | None = None
    """Indices of the scorers that score them; None for all."""
    media: tuple[MediaTensor, ...] = ()
    """Media of the samples."""
    evaluate: bool = True
    """Evaluation scorers score them, too. No matter if `only` names the scorers."""

    @property
    def media_bytes(self) -> int:
        """What its media take."""
        return sum({id(tensor.buffer): tensor.buffer.size_bytes for tensor in self.media}.values())


@dataclass(frozen=True, slots=True)
class RequestResult:
    """The rewards of a request; each field has one element for each sample."""

    id: str
    rewards: tuple[float | None, ...]
    statuses: tuple[Status, ...]
    problems: tuple[tuple[str, ...], ...]
    scores: dict[str, tuple[float | None, ...]]
    """By label, and by ``label/key`` of scorers with several scores."""
    failures: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Of a request with `only`, by label, of the scorers that failed for some samples: for each sample a sentence,
    empty where it has a score."""
    decode_s: float = 0.0
    """How long the decoding of latents took, in seconds."""
    evaluation_scores: dict[str, tuple[float | None, ...]] = field(default_factory=dict)
    """The same of evaluation scorers, which are no part of the rewards; those that `only` names are among `scores`."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Pass the result of a request to its client."""

    result: RequestResult


Command = SubmitTask | CancelTask | Answer


def scorers_of(request: RewardRequest, scorers: Sequence[WeightedScorer]) -> tuple[tuple[int, ...], ...]:
    """Return, of each prompt of a request, the indices of the scorers that score it.

    A request that names its scorers chooses by itself: their tasks do not matter to it.
    """
    if request.only is not None:
        return (tuple(sorted(request.only)),) * len(request.prompts)
    return tuple(
        tuple(
            index
            for index, scorer in enumerate(scorers)
            if scorer.scores(prompt.metadata) and (request.evaluate or not scorer.evaluates)
        )
        for prompt in request.prompts
    )


class LackingMedia(NamedTuple):
    """A sample without the media that one of its scorers reads."""

    sample: int
    scorer: int
    wanted: Input
    form: MediaForm | None
    """Of the media that it has."""


def lacking_media(
    request: RewardRequest,
    scorers: Sequence[WeightedScorer],
    inputs: Sequence[Input | None],
    decoded: Collection[int] = (),
) -> LackingMedia | None:
    """Return the first sample that could have no reward, as it lacks media; None if there is none.

    Args:
        request: with its samples.
        scorers: all of them. Those of weight 0 may fail.
        inputs: what each of them reads; None if that is not known yet.
        decoded: channels of the latents that are decoded to pixels.
    """
    needs = [scorer.weight and wanted not in (None, "text") for scorer, wanted in zip(scorers, inputs, strict=True)]
    if not any(needs):
        return None
    wanted_by_prompt = scorers_of(request, scorers)
    for sample in request.samples:
        form = None if sample.media is None else request.media[sample.media.tensor].form
        kind = form.kind if form is not None else None
        is_decoded = form is not None and form.kind == "latents" and form.shape[0] in decoded
        for scorer in wanted_by_prompt[sample.prompt]:
            wanted = inputs[scorer]
            if is_decoded and wanted == "pixels":
                continue
            if needs[scorer] and wanted is not None and lacks(wanted, kind):
                return LackingMedia(sample.index, scorer, wanted, form)
    return None


@dataclass(slots=True)
class _RequestInProgress:
    request: RewardRequest
    deadline: float
    wanted: tuple[tuple[int, ...], ...]
    """Of each prompt the scorers that score it."""
    scores: list[list[Score | None]]
    """[scorer][sample]."""
    tasks: set[str]
    """Ids of the tasks that are not complete."""
    num_missing: dict[str, int]
    """Scores that each of them lacks."""


@dataclass
class RewardRequests:
    """The requests of one reward service."""

    scorers: tuple[WeightedScorer, ...]
    bounds: RewardBounds
    timeout_s: float
    """Time limit of a request, from its arrival to its answer."""
    _requests: dict[str, _RequestInProgress] = field(default_factory=dict)
    _request_of: dict[str, str] = field(default_factory=dict)
    """By task."""

    def __post_init__(self) -> None:
        self._named = tuple(replace(scorer, evaluates=False) for scorer in self.scorers)

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: RewardRequest, now: float) -> list[Command]:
        """Add a request with a new id, at `now`."""
        wanted = scorers_of(request, self.scorers)
        scores: list[list[Score | None]] = [[None] * len(request.samples) for _ in self.scorers]
        entry = _RequestInProgress(request, now + self.timeout_s, wanted, scores, set(), {})
        commands: list[Command] = []
        for number, scored_by in enumerate(dict.fromkeys(wanted)):
            task = _task_of(request, f"{request.id}/{number}", wanted, scored_by)
            if scored_by and task.samples:
                entry.tasks.add(task.id)
                entry.num_missing[task.id] = len(task.samples) * len(scored_by)
                self._request_of[task.id] = request.id
                commands.append(SubmitTask(task))
        if not commands:
            return [Answer(self._result(entry))]
        self._requests[request.id] = entry
        return commands

    def has_task(self, task: str) -> bool:
        """Whether a task belongs to one of the requests."""
        return task in self._request_of

    def record(self, score: Score) -> list[Command]:
        """Record one score. One of an unknown task, or one that is recorded already, changes nothing."""
        entry = self._requests.get(self._request_of.get(score.task, ""))
        if entry is None or entry.scores[score.scorer][score.completion] is not None:
            return []
        entry.scores[score.scorer][score.completion] = score
        entry.num_missing[score.task] -= 1
        if not entry.num_missing[score.task]:
            entry.tasks.remove(score.task)
            del self._request_of[score.task]
        return [] if entry.tasks else self._answered(entry)

    def expire(self, now: float) -> list[Command]:
        """Answer the requests whose time is up at `now`; samples without all scores have timed out."""
        commands: list[Command] = []
        for entry in list(takewhile(lambda one: one.deadline <= now, self._requests.values())):
            commands += [CancelTask(task) for task in sorted(entry.tasks)]
            commands += self._answered(entry)
        return commands

    def next_deadline(self) -> float | None:
        """When `expire` must be called at the latest; None without requests."""
        # All have the same time limit, so they are in the order of their deadlines.
        return next((entry.deadline for entry in self._requests.values()), None)

    def cancel(self, id: str) -> list[Command]:
        """Drop a request, if there is one of this id, without an answer."""
        entry = self._requests.get(id)
        if entry is None:
            return []
        commands: list[Command] = [CancelTask(task) for task in sorted(entry.tasks)]
        self._forget(entry)
        return commands

    def _answered(self, entry: _RequestInProgress) -> list[Command]:
        result = self._result(entry)
        self._forget(entry)
        return [Answer(result)]

    def _forget(self, entry: _RequestInProgress) -> None:
        del self._requests[entry.request.id]
        for task in entry.tasks:
            del self._request_of[task]

    def _result(self, entry: _RequestInProgress) -> RequestResult:
        outcomes = [self._outcome(entry, sample) for sample in entry.request.samples]
        request, scorers = entry.request, self._seen_by(entry.request)
        return RequestResult(
            request.id,
            tuple(one.reward for one in outcomes),
            tuple(one.status for one in outcomes),
            tuple(one.problems for one in outcomes),
            components(scorers, entry.scores),
            self._failures(entry),
            math.fsum(_decode_s(column) for column in zip(*entry.scores, strict=True)),
            evaluation_scores=components(scorers, entry.scores, evaluates=True) if request.evaluate else {},
        )

    def _seen_by(self, request: RewardRequest) -> tuple[WeightedScorer, ...]:
        """Return all scorers as a request sees them: to one that names its scorers, they are all alike."""
        return self.scorers if request.only is None else self._named

    def _failures(self, entry: _RequestInProgress) -> dict[str, tuple[str, ...]]:
        """Return why samples have no score of a scorer, by its label."""
        request, found = entry.request, {}
        for index in request.only or ():
            row = entry.scores[index]
            if any(score is None or score.value is None for score in row):
                reasons = (self._why_missing(entry, index, sample) for sample in request.samples)
                found[self.scorers[index].label] = tuple(reasons)
        return found

    def _why_missing(self, entry: _RequestInProgress, index: int, sample: Sample) -> str:
        """Return why a sample has no score of the scorer `index`; empty if it has one."""
        score = entry.scores[index][sample.index]
        if score is not None:
            return "" if score.value is not None else score.problem or f"scorer {self.scorers[index].label!r} failed."
        return f"scorer {self.scorers[index].label!r} gave no score within {self.timeout_s:g} s."

    def _outcome(self, entry: _RequestInProgress, sample: Sample) -> CombinedScores:
        column = [row[sample.index] for row in entry.scores]
        wanted = entry.wanted[sample.prompt]
        scorers = self._seen_by(entry.request)
        found = combine(column, scorers, self.bounds, wanted=wanted, status=sample.completion.status)
        missing = sum(column[scorer] is None for scorer in wanted)
        if not missing:
            return found
        late = f"{counted(missing, 'score')} did not come within {self.timeout_s:g} s."
        return CombinedScores(found.reward, found.status, (*found.problems, late))


def _task_of(
    request: RewardRequest, id: str, wanted: tuple[tuple[int, ...], ...], scored_by: tuple[int, ...]
) -> ScoreTask:
    """Return the task of the samples whose prompts the scorers `scored_by` score."""
    samples = tuple(sample for sample in request.samples if wanted[sample.prompt] == scored_by)
    return ScoreTask(id, request.prompts, samples, scored_by, request.media)


def _decode_s(column: Iterable[Score | None]) -> float:
    """Return how long the latents of a sample took to be decoded, which each of its scores says that needed it."""
    return max((score.decode_s for score in column if score is not None), default=0.0)
