"""Tasks whose latents are being decoded: each sample once, by the decoder for the channels of its latents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from starling.common.wire.messages import CompletionText, Status
from starling.reward.core.media import MediaForm, MediaTensor
from starling.reward.core.samples import PromptText, Sample, Score, ScoreTask
from starling.reward.score.decode.geometry import Geometries, no_decoder
from starling.reward.score.decode.pixels import allocate_pixels, seal_pixels
from starling.reward.score.pool.pool import ScoringPool
from starling.reward.score.scorers.batch import ScorerForm
from starling.reward.score.workers.shared import MediaMemory, TooManyBuffersError

_PROMPT: Final = PromptText("", "", {})
_COMPLETION: Final = CompletionText(text="", status=Status.OK, num_tokens=0)


class DecodingFailure(NamedTuple):
    """Why a sample has no pixels."""

    status: Status
    problem: str
    """A sentence."""


@dataclass(slots=True, eq=False)
class Decoding:
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
    failures: dict[int, DecodingFailure] = field(default_factory=dict)
    """Why there are no pixels."""

    def fail(self, positions: Sequence[int], problem: str) -> None:
        """Note that samples at these indices have no pixels; `problem` is a sentence."""
        self.failures |= dict.fromkeys(positions, DecodingFailure(Status.REWARD_ERROR, problem))

    def failures_of_groups(self) -> dict[int, DecodingFailure]:
        """Return the failures of samples, and of all others of their groups."""
        samples = self.task.samples
        of_group = {samples[position].prompt: failure for position, failure in self.failures.items()}
        return {
            position: self.failures.get(position, of_group[sample.prompt])
            for position, sample in enumerate(samples)
            if sample.prompt in of_group
        }


class DecodingTable:
    """The tasks that are being decoded.

    Args:
        decoders: a pool whose scorers are the decoders, in the order of `geometries`.
        geometries: of the VAEs.
        memory: for the pixels.
    """

    def __init__(self, decoders: ScoringPool, geometries: Geometries, memory: MediaMemory) -> None:
        self._decoders, self._geometries, self._memory = decoders, geometries, memory
        self._decodings: dict[str, Decoding] = {}
        self._decoding_of: dict[str, str] = {}
        """Tasks by those of the decoders."""
        self.num_decoded, self.decode_s = 0, 0.0

    def __contains__(self, task_id: str) -> bool:
        return task_id in self._decodings

    def tasks(self) -> Iterator[ScoreTask]:
        """Yield the tasks, each with the scorers that read pixels."""
        return (decoding.task for decoding in self._decodings.values())

    def begin(self, decoding: Decoding) -> bool:
        """Begin to decode the latents of a task; returns whether any can be. What cannot is noted as a failure."""
        task = decoding.task
        forms = self._pixel_forms(decoding)
        try:
            decoding.pixels = allocate_pixels(self._memory, task, forms)
        except TooManyBuffersError as error:
            decoding.fail(list(forms), f"there is no memory for them: {error}.")
        if not decoding.pixels:
            return False
        decoding.left = set(decoding.pixels)
        self._decodings[task.id] = decoding
        for decoder, channels in enumerate(self._geometries):
            positions = [one for one in forms if _channels(task, task.samples[one]) == channels]
            if positions:
                part = _decoder_task(task, f"{task.id}/decoded/{channels}", positions, decoder, decoding.pixels)
                self._decoding_of[part.id] = task.id
                self._decoders.submit(part)
        return True

    def record(self, score: Score) -> Decoding | None:
        """Note that a sample is decoded, or cannot be; returns the decoding of its task if it was the last."""
        decoding = self._decodings.get(self._decoding_of.get(score.task, ""))
        if decoding is None:
            return None
        position = score.completion
        decoding.left.discard(position)
        if score.value is None:
            decoding.failures[position] = DecodingFailure(score.status, score.problem)
        else:
            decoding.seconds[position] = score.value
            self.num_decoded += 1
            self.decode_s += score.value
        if decoding.left:
            return None
        task_id = decoding.task.id
        del self._decodings[task_id]
        self._decoding_of = {id: one for id, one in self._decoding_of.items() if one != task_id}
        try:
            seal_pixels(decoding.pixels.values())
        except ValueError as error:
            decoding.fail(list(decoding.pixels), f"{error}.")
        return decoding

    def cancel(self, task_id: str) -> None:
        """Drop a task."""
        if self._decodings.pop(task_id, None) is None:
            return
        for id in [id for id, task in self._decoding_of.items() if task == task_id]:
            del self._decoding_of[id]
            self._decoders.cancel(id)

    def clear(self) -> None:
        """Forget all tasks."""
        self._decodings.clear()

    def _pixel_forms(self, decoding: Decoding) -> dict[int, MediaForm]:
        """Return the forms of the pixels of samples with latents, by their indices; those without a decoder fail."""
        task, forms = decoding.task, dict[int, MediaForm]()
        for position, sample in enumerate(task.samples):
            if sample.media is None or task.media_kind(sample) != "latents":
                continue
            form = task.media[sample.media.tensor].form
            geometry = self._geometries.get(form.shape[0])
            if geometry is None:
                decoding.fail([position], no_decoder(form, self._geometries))
            else:
                forms[position] = geometry.pixels_of(form)
        return forms


def _decoder_task(
    task: ScoreTask, id: str, positions: Sequence[int], decoder: int, pixels: Mapping[int, MediaTensor]
) -> ScoreTask:
    """Return the task of a decoder: samples of another task, numbered by their positions in it."""
    samples = tuple(Sample(position, 0, _COMPLETION, task.samples[position].media) for position in positions)
    outputs = tuple(pixels[position] for position in positions)
    return ScoreTask(id, (_PROMPT,), samples, (decoder,), task.media, outputs)


def _channels(task: ScoreTask, sample: Sample) -> int:
    """Return the channels of a sample's latents."""
    assert sample.media is not None
    return task.media[sample.media.tensor].form.shape[0]
