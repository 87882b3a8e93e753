"""Pool of workers that decodes latents once, before the pool of scorers judges their pixels.

    submit ---------------------------------> scorers that read texts or latents
      \\--> decoder, once for each sample ---> scorers that read pixels

Decoders are scorers of their own kind, in a pool of their own: they are killed at their time limit, replaced when they
end, and a sample that fails in a batch is decoded again alone. The service prepares one buffer for the pixels of a
task, whose length follows from the VAE's configuration; workers write into it, and it is sealed when all have written.
A sample that could not be decoded fails for the scorers that read pixels; where these compare, its group does.

The parts:

    start        the pool of a service, and the check before it
    decodings    tasks whose latents are being decoded
    pixels       memory for pixels, and samples with them
    parts        tasks that are scored in parts
    scorers      decoders as scorers of a pool
    geometry     shapes of pixels by those of latents
    vae          a decoder, in a worker
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Self

import structlog

from starling.common.wire.messages import Wait
from starling.reward.core.samples import LostCall, Score, ScoreTask
from starling.reward.score.decode.decodings import Decoding, DecodingTable
from starling.reward.score.decode.geometry import Geometries
from starling.reward.score.decode.parts import PartTable
from starling.reward.score.decode.pixels import with_pixels
from starling.reward.score.decode.scorers import decoder_scorers
from starling.reward.score.pool.pool import ScoringPool
from starling.reward.score.scorers.batch import ScorerForm
from starling.reward.score.workers.shared import MediaMemory
from starling.reward.settings import RewardSettings

if TYPE_CHECKING:
    from starling.common.observe.metrics import Samples

log = structlog.get_logger(__name__)


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
        self._settings, self._clock = settings, clock
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
        self._decodings = DecodingTable(self._decoders, geometries, memory)
        self._parts = PartTable()
        self._scores: list[Score] = []

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
        if task.id in self._undivided or task.id in self._decodings or self._parts.has_of(task.id):
            raise ValueError(f"task {task.id!r} is being scored already")
        self._undivided[task.id] = task
        self._divide()

    def cancel(self, task_id: str) -> None:
        """Drop a task and its further scores. A running call continues, up to its time limit."""
        self._undivided.pop(task_id, None)
        self._decodings.cancel(task_id)
        for id in self._parts.cancel(task_id):
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
                if (decoding := self._decodings.record(score)) is not None:
                    self._score_pixels(decoding)
            for lost in self._decoders.take_lost():
                log.warning("latents_not_decoded", reason=lost.problem)
            for score in self._scoring.poll():
                self._scores.append(self._parts.record(score))
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

    def measure(self) -> None:
        """Measure from now on what the calls of the scorers take."""
        self._scoring.measure()

    def samples(self) -> Samples:
        """Return the measured metrics."""
        return self._scoring.samples()

    def gauges(self) -> dict[str, float]:
        """Return measurements for the heartbeat."""
        decoders, found = self._decoders.gauges(), self._scoring.gauges()
        tasks = [*self._undivided.values(), *self._decodings.tasks()]
        found["queue_depth"] += float(sum(len(task.samples) * len(task.scorers) for task in tasks))
        return found | {
            "samples_decoded": float(self._decodings.num_decoded),
            "decode_seconds": self._decodings.decode_s,
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
                decoding = Decoding(replace(task, scorers=tuple(of_pixels)), of_pixels)
                if not self._decodings.begin(decoding):
                    self._score_pixels(decoding)

    # --- from pixels to scores ---------------------------------------------------------------------------------------

    def _score_pixels(self, decoding: Decoding) -> None:
        """Score the samples that have pixels by the scorers that read them; the others fail."""
        task = decoding.task
        samples, media = with_pixels(task, decoding.pixels, decoding.failures)
        by_completion = {task.samples[position].index: one for position, one in decoding.seconds.items()}
        for scope in ("pointwise", "groupwise"):
            scorers = tuple(scorer for scorer, form in decoding.scorers.items() if form.scope == scope)
            failed = decoding.failures if scope == "pointwise" else decoding.failures_of_groups()
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
        if (added := self._parts.add(task, part, suffix, seconds)) is not None:
            self._scoring.submit(added)
