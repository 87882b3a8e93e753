"""Samples and scores: the data that front ends, workers and cores exchange."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from starling.common.wire.messages import CompletionText, Status
from starling.reward.core.media import MediaKind, MediaRow, MediaTensor


class PromptText(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """The prompt of one or more completions, as scorers get it."""

    text: str
    reference: str
    metadata: dict[str, Any]


class Sample(msgspec.Struct, frozen=True):
    """A completion to score."""

    index: int
    """In its group."""
    prompt: int
    """Index of its prompt in the task."""
    completion: CompletionText
    media: MediaRow | None = None
    """Where its media are among those of the task; None without media."""


@dataclass(frozen=True, slots=True)
class ScoreTask:
    """Samples that are to be scored together."""

    id: str
    """The lease of the group."""
    prompts: tuple[PromptText, ...]
    samples: tuple[Sample, ...]
    scorers: tuple[int, ...]
    """Indices of the scorers in the settings."""
    media: tuple[MediaTensor, ...] = ()
    """Media of the samples."""
    outputs: tuple[MediaTensor, ...] = ()
    """Of a task for decoders of latents: of each sample where its pixels are to be written."""

    def media_kind(self, sample: Sample) -> MediaKind | None:
        """Return what the media of one of its samples are; None if that has none."""
        return None if sample.media is None else self.media[sample.media.tensor].form.kind


def group_task(
    id: str,
    completions: Iterable[tuple[int, CompletionText]],
    prompt: PromptText,
    scorers: tuple[int, ...],
    media: tuple[MediaTensor, ...] = (),
) -> ScoreTask:
    """Return the task of a group: completions, with their indices in it, of one prompt.

    With media, there is one tensor for each index.
    """
    samples = tuple(
        Sample(index, 0, completion, MediaRow(index) if media else None) for index, completion in completions
    )
    return ScoreTask(id, (prompt,), samples, scorers, media)


class Score(NamedTuple):
    """Score of one completion by one scorer."""

    task: str
    completion: int
    """Index of the completion in its group."""
    scorer: int
    """Index of the scorer in the settings."""
    value: float | None
    """The unweighted score, finite; None if it failed."""
    status: Status = Status.OK
    """`reward_error` or `reward_timeout` where `value` is None."""
    problem: str = ""
    """One sentence on the failure."""
    parts: tuple[tuple[str, float | None], ...] = ()
    """All scores by key, where the scorer names them; `value` is one of them, or a sum."""
    decode_s: float = 0.0
    """How long the completion's latents took to be decoded, for a scorer that reads pixels, in seconds."""


@dataclass(frozen=True, slots=True)
class LostCall:
    """Completions whose scoring ended the worker, or exceeded the time limit, at every try.

    That is one completion, or all of a prompt where the scorer compares them.
    """

    scorer: int
    """Index of the scorer in the settings."""
    prompt: PromptText
    completions: tuple[CompletionText, ...]
    problem: str
    """One sentence on the last try."""
    media: tuple[tuple[MediaTensor, int], ...] = ()
    """Of each completion where its media are, if the scorer reads them: the tensor and the row."""
