"""Pool of workers that decodes latents once, before the pool of scorers judges their pixels.

    submit ---------------------------------> scorers that read texts or latents
      \\--> decoder, once for each sample ---> scorers that read pixels

Decoders are scorers of their own kind, in a pool of their own: they are killed at their time limit, replaced when they
end, and a sample that fails in a batch is decoded again alone. The service prepares one buffer for the pixels of a
task, whose length follows from the VAE's configuration; workers write into it, and it is sealed when all have written.
A sample that could not be decoded fails for the scorers that read pixels; where these compare, its group does.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Self

import structlog

from starling.common.wire.messages import CompletionText, Status, Wait
from starling.reward.core.media import MediaForm, MediaRow, MediaTensor
from starling.reward.core.samples import LostCall, PromptText, Sample, Score, ScoreTask
from starling.reward.score.decode.geometry import Geometries, no_decoder, read_geometries
from starling.reward.score.decode.scorers import decoder_scorers
from starling.reward.score.pool.check import check_scorers
from starling.reward.score.pool.pool import ScoringPool
from starling.reward.score.scorers.batch import ScorerForm
from starling.reward.score.workers.places import offsets_of
from starling.reward.score.workers.shared import MediaMemory, SharedBuffer, TooManyBuffersError
from starling.reward.settings import RewardSettings

log = structlog.get_logger(__name__)

_PROMPT: Final = PromptText("", "", {})
_COMPLETION: Final = CompletionText(text="", status=Status.OK, num_tokens=0)


class _Failure(NamedTuple):
    status: Status
    problem: str
    """A sentence."""


@dataclass(slots=True, eq=False)
class _Decoding:
    """A task whose latents are being decoded."""

    task: ScoreTask
    """Its samples, and the scorers that read pixels."""
    scorers: dict[int, ScorerForm]
    """How these scorers are called."""
    pixels: dict[int, MediaTensor] = field(default_factory=dict)
    """Where the pixels of samples with latents go, by their indices in the task."""
    left: set[int] = field(default_factory=set)
    """Those that are not decoded yet."""
    seconds: dict[int, float] = field(default_factory=dict)
    """How long each has taken."""
    failures: dict[int, _Failure] = field(default_factory=dict)
    """Why there are no pixels."""


@dataclass(slots=True)
class _Part:
    """A part of a task that is being scored under an id of its own."""

    task: str
    """Id of the task."""
    num_left: int
    """Scores to come."""
    seconds: Mapping[int, float]
    """How long the decoding of each sample has taken, by its index in the group or request."""


class DecodingPool:
    """A pool of scorers with decoders of latents before it, with the methods of `ScoringPool`.

    Args:
        settings: of the service.
        geometries: of its VAEs.
        memory: for the pixels.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        settings: RewardSettings,
        geometries: Geometries,
        memory: MediaMemory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._geometries, self._memory, self._clock = settings, geometries, memory, clock
        self._index_of = {channels: index for index, channels in enumerate(geometries)}
        decoders = decoder_scorers(settings, geometries)
        self._scoring = ScoringPool(settings, clock)
        try:
            self._decoders = ScoringPool(decoders, clock, what="decoder", is_essential=False)
        except BaseException:
            self._scoring.close()
            raise
        self._selector = selectors.EpollSelector()
        for pool in (self._scoring, self._decoders):
            self._selector.register(pool, selectors.EVENT_READ)
        self._undivided: dict[str, ScoreTask] = {}
        """Tasks with latents that wait for it to be known what their scorers read."""
        self._decodings: dict[str, _Decoding] = {}
        self._decoding_of: dict[str, str] = {}
        """Tasks by those of the decoders."""
        self._parts: dict[str, _Part] = {}
        self._scores: list[Score] = []
        self._num_decoded, self._decode_s = 0, 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """A file descriptor that is readable when `poll` has something to do; the same one until `close`."""
        return self._selector.fileno()

    def submit(self, task: ScoreTask) -> None:
        """Start to score a task. Raises ValueError when its id is being scored already."""
        if not any(tensor.form.kind == "latents" for tensor in task.media):
            self._scoring.submit(task)
            return
        scored = {part.task for part in self._parts.values()}
        if task.id in self._undivided or task.id in self._decodings or task.id in scored:
            raise ValueError(f"task {task.id!r} is being scored already")
        self._undivided[task.id] = task
        self._divide()

    def cancel(self, task_id: str) -> None:
        """Drop a task and its further scores. A running call continues, up to its time limit."""
        self._undivided.pop(task_id, None)
        if self._decodings.pop(task_id, None) is not None:
            for id in [id for id, task in self._decoding_of.items() if task == task_id]:
                del self._decoding_of[id]
                self._decoders.cancel(id)
        for id in [id for id, part in self._parts.items() if part.task == task_id]:
            del self._parts[id]
            self._scoring.cancel(id)
        self._scoring.cancel(task_id)
        self._scores = [score for score in self._scores if score.task != task_id]

    def poll(self, timeout_s: float = 0.0) -> list[Score]:
        """Return the new scores; waits up to `timeout_s` for the first.

        Raises ConfigError when no worker runs and none can be started.
        """
        end = self._clock() + timeout_s
        while True:
            for score in self._decoders.poll():
                self._decoded(score)
            for lost in self._decoders.take_lost():
                log.warning("latents_not_decoded", reason=lost.problem)
            for score in self._scoring.poll():
                self._record(score)
            self._divide()
            deadline = self.next_deadline()
            left_s = (end if deadline is None else min(end, deadline)) - self._clock()
            if self._scores or self._clock() >= end:
                break
            self._selector.select(max(0.0, left_s))
        scores, self._scores = self._scores, []
        return scores

    def take_lost(self) -> list[LostCall]:
        """Return the completions that were given up since the last call."""
        return self._scoring.take_lost()

    def next_deadline(self) -> float | None:
        """When `poll` must be called at the latest, in monotonic seconds; None without such a time."""
        if self._scores:
            return self._clock()
        deadlines = self._scoring.next_deadline(), self._decoders.next_deadline()
        return min((one for one in deadlines if one is not None), default=None)

    def form_of(self, scorer: int) -> ScorerForm | None:
        """Return how a scorer is called; None before a worker has loaded it."""
        return self._scoring.form_of(scorer)

    @property
    def is_ready(self) -> bool:
        """Whether each scorer and each VAE that is not quarantined is loaded in a worker."""
        return self._scoring.is_ready and self._decoders.is_ready

    def quarantined(self) -> dict[str, str]:
        """Return why no worker can be started, by the titles of the scorers and decoders that are quarantined."""
        return self._scoring.quarantined() | self._decoders.quarantined()

    def worker_pids(self) -> tuple[int, ...]:
        """Return the process ids of the current workers of scorers."""
        return self._scoring.worker_pids()

    def decoder_pids(self) -> tuple[int, ...]:
        """Return the process ids of the current workers of decoders."""
        return self._decoders.worker_pids()

    def gauges(self) -> dict[str, float]:
        """Return measurements for the heartbeat."""
        decoders, found = self._decoders.gauges(), self._scoring.gauges()
        tasks = [*self._undivided.values(), *(decoding.task for decoding in self._decodings.values())]
        found["queue_depth"] += float(sum(len(task.samples) * len(task.scorers) for task in tasks))
        return found | {
            "samples_decoded": float(self._num_decoded),
            "decode_seconds": self._decode_s,
            "decoders_ready": decoders["workers_ready"],
            "decoders_replaced": decoders["workers_replaced"],
        }

    def waits(self) -> tuple[Wait, ...]:
        """Return what each busy worker does, with the time after which it is killed."""
        return self._scoring.waits() + self._decoders.waits()

    def close(self, grace_s: float = 0.5) -> None:
        """End all workers: idle ones may exit by themselves within `grace_s`, altogether; the others are killed."""
        self._selector.close()
        self._decodings.clear()
        self._decoders.close(grace_s)
        self._scoring.close(grace_s)

    # --- from a task to its decoding --------------------------------------------------------------------------------

    def _divide(self) -> None:
        """Score what needs no pixels, and decode the rest, of tasks of whose scorers all are known."""
        if not self._undivided:
            return
        quarantined = self._scoring.quarantined()
        for task in list(self._undivided.values()):
            forms = {scorer: self._scoring.form_of(scorer) for scorer in task.scorers}
            if any(form is None and self._title(scorer) not in quarantined for scorer, form in forms.items()):
                continue
            del self._undivided[task.id]
            of_pixels = {scorer: form for scorer, form in forms.items() if form is not None and form.media == "pixels"}
            others = tuple(scorer for scorer in task.scorers if scorer not in of_pixels)
            self._score(task, replace(task, scorers=others), "")
            if of_pixels:
                self._decode(_Decoding(replace(task, scorers=tuple(of_pixels)), of_pixels))

    def _decode(self, decoding: _Decoding) -> None:
        """Begin to decode the latents of a task for the scorers that read pixels."""
        task, failures, forms = decoding.task, decoding.failures, dict[int, MediaForm]()
        for position, sample in enumerate(task.samples):
            if sample.media is None or task.media_kind(sample) != "latents":
                continue
            form = task.media[sample.media.tensor].form
            geometry = self._geometries.get(form.shape[0])
            if geometry is None:
                failures[position] = _Failure(Status.REWARD_ERROR, no_decoder(form, self._geometries))
            else:
                forms[position] = geometry.pixels_of(form)
        try:
            decoding.pixels = _allocated(self._memory, task, forms)
        except TooManyBuffersError as error:
            failures |= dict.fromkeys(forms, _Failure(Status.REWARD_ERROR, f"there is no memory for them: {error}."))
        if not decoding.pixels:
            self._score_pixels(decoding)
            return
        decoding.left = set(decoding.pixels)
        self._decodings[task.id] = decoding
        for channels, decoder in self._index_of.items():
            positions = [one for one in forms if _channels(task, task.samples[one]) == channels]
            if positions:
                part = _decoder_task(task, f"{task.id}/decoded/{channels}", positions, decoder, decoding.pixels)
                self._decoding_of[part.id] = task.id
                self._decoders.submit(part)

    def _decoded(self, score: Score) -> None:
        """Note that a sample is decoded, or cannot be."""
        decoding = self._decodings.get(self._decoding_of.get(score.task, ""))
        if decoding is None:
            return
        position = score.completion
        decoding.left.discard(position)
        if score.value is None:
            decoding.failures[position] = _Failure(score.status, score.problem)
        else:
            decoding.seconds[position] = score.value
            self._num_decoded += 1
            self._decode_s += score.value
        if decoding.left:
            return
        task = decoding.task
        del self._decodings[task.id]
        self._decoding_of = {id: one for id, one in self._decoding_of.items() if one != task.id}
        try:
            _seal(decoding.pixels.values())
        except ValueError as error:
            decoding.failures |= dict.fromkeys(decoding.pixels, _Failure(Status.REWARD_ERROR, f"{error}."))
        self._score_pixels(decoding)

    # --- from pixels to scores ---------------------------------------------------------------------------------------

    def _score_pixels(self, decoding: _Decoding) -> None:
        """Score the samples that have pixels by the scorers that read them; the others fail."""
        task = decoding.task
        samples, media = _with_pixels(task, decoding.pixels, decoding.failures)
        by_completion = {task.samples[position].index: one for position, one in decoding.seconds.items()}
        for scope in ("pointwise", "groupwise"):
            scorers = tuple(scorer for scorer, form in decoding.scorers.items() if form.scope == scope)
            failed = decoding.failures if scope == "pointwise" else _of_groups(task, decoding.failures)
            for scorer in scorers:
                for position, (status, why) in failed.items():
                    problem = f"scorer {self._title(scorer)!r} got no pixels: {why}"
                    self._scores.append(Score(task.id, task.samples[position].index, scorer, None, status, problem))
            kept = tuple(one for position, one in enumerate(samples) if position not in failed)
            part = ScoreTask(f"{task.id}/{scope}", task.prompts, kept, scorers, media)
            self._score(task, part, f"/{scope}", by_completion)

    def _title(self, scorer: int) -> str:
        return self._settings.scorers[scorer].title

    def _score(self, task: ScoreTask, part: ScoreTask, suffix: str, seconds: Mapping[int, float] | None = None) -> None:
        """Score a part of a task, if it has samples and scorers."""
        part = replace(part, id=f"{task.id}/scored{suffix}")
        num = len(part.samples) * len(part.scorers)
        if num:
            self._parts[part.id] = _Part(task.id, num, seconds or {})
            self._scoring.submit(part)

    def _record(self, score: Score) -> None:
        """Take the score of a task, or of a part of one."""
        part = self._parts.get(score.task)
        if part is None:
            self._scores.append(score)
            return
        part.num_left -= 1
        if not part.num_left:
            del self._parts[score.task]
        self._scores.append(score._replace(task=part.task, decode_s=part.seconds.get(score.completion, 0.0)))


AnyPool = ScoringPool | DecodingPool


def open_pool(settings: RewardSettings, memory: MediaMemory) -> AnyPool:
    """Return the pool of a service, with decoders if there are any. Raises ConfigError when it cannot be started."""
    geometries = read_geometries(settings.decoder.folders)
    return DecodingPool(settings, geometries, memory) if geometries else ScoringPool(settings)


def check_pool(settings: RewardSettings, *, only_texts: bool = False) -> None:
    """Load every scorer and VAE in a worker, as the service will.

    Args:
        settings: of the service.
        only_texts: whether its samples have no media.

    Raises:
        ConfigError: one cannot be used.
    """
    geometries = read_geometries(settings.decoder.folders)
    check_scorers(settings, only_texts=only_texts)
    if geometries:
        check_scorers(decoder_scorers(settings, geometries))


def _allocated(memory: MediaMemory, task: ScoreTask, forms: Mapping[int, MediaForm]) -> dict[int, MediaTensor]:
    """Return memory for the pixels of samples of a task, in one buffer, for which room was reserved with the latents.

    Raises TooManyBuffersError.
    """
    if not forms:
        return {}
    offsets, end = offsets_of(form.size_bytes for form in forms.values())
    latents = task.media[0].buffer
    assert isinstance(latents, SharedBuffer)
    latents.release(sum(form.size_bytes for form in forms.values()))
    buffer = memory.allocate(end)
    return {
        position: MediaTensor(form, 1, buffer, offset)
        for (position, form), offset in zip(forms.items(), offsets, strict=True)
    }


def _seal(pixels: Iterable[MediaTensor]) -> None:
    """Let nobody write to the buffer of all these pixels any more. Raises ValueError."""
    buffer = next(iter(pixels)).buffer
    assert isinstance(buffer, SharedBuffer)
    buffer.seal()


def _decoder_task(
    task: ScoreTask, id: str, positions: Sequence[int], decoder: int, pixels: Mapping[int, MediaTensor]
) -> ScoreTask:
    """Return the task of a decoder: samples of another task, numbered by their positions in it."""
    samples = tuple(Sample(position, 0, _COMPLETION, task.samples[position].media) for position in positions)
    outputs = tuple(pixels[position] for position in positions)
    return ScoreTask(id, (_PROMPT,), samples, (decoder,), task.media, outputs)


def _of_groups(task: ScoreTask, failures: Mapping[int, _Failure]) -> dict[int, _Failure]:
    """Return the failures of samples, and of all others of their groups."""
    of_group = {task.samples[position].prompt: failure for position, failure in failures.items()}
    return {
        position: failures.get(position, of_group[sample.prompt])
        for position, sample in enumerate(task.samples)
        if sample.prompt in of_group
    }


def _with_pixels(
    task: ScoreTask, pixels: Mapping[int, MediaTensor], failures: Collection[int]
) -> tuple[tuple[Sample, ...], tuple[MediaTensor, ...]]:
    """Return the samples of a task with their pixels as their media, which are decoded, or came so; and these media."""
    media = {index: tensor for index, tensor in enumerate(task.media) if tensor.form.kind == "pixels"}
    new_index = {index: number for number, index in enumerate(media)}
    tensors, samples = list(media.values()), list[Sample]()
    for position, sample in enumerate(task.samples):
        row = None
        if position in pixels and position not in failures:
            row = MediaRow(len(tensors))
            tensors.append(pixels[position])
        elif sample.media is not None and sample.media.tensor in new_index:
            row = MediaRow(new_index[sample.media.tensor], sample.media.row)
        samples.append(Sample(sample.index, sample.prompt, sample.completion, row))
    return tuple(samples), tuple(tensors)


def _channels(task: ScoreTask, sample: Sample) -> int:
    """Return the channels of a sample's latents."""
    assert sample.media is not None
    return task.media[sample.media.tensor].form.shape[0]
