"""Division of a task's samples into calls. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from starling.reward.core.media import lacks
from starling.reward.core.samples import ScoreTask
from starling.reward.score.pool.call import UndividedSamples
from starling.reward.score.scorers.batch import ScorerForm


class ScorableSamples(NamedTuple):
    """Samples, divided by whether a scorer can score them."""

    positions: tuple[int, ...]
    """Indices in the task of those that it can score."""
    problems: dict[int, str]
    """Why it cannot score the others, as the end of a sentence, by their indices in the task."""


def scorable(samples: UndividedSamples, form: ScorerForm) -> ScorableSamples:
    """Divide samples by whether they have the media that a scorer reads, or their groups, where it compares."""
    task = samples.state.task
    if form.media == "text":
        return ScorableSamples(samples.positions, {})
    kinds = [task.media_kind(sample) for sample in task.samples]
    lacking = [lacks(form.media, kind) for kind in kinds]
    groups = {sample.prompt for sample, lacks_media in zip(task.samples, lacking, strict=True) if lacks_media}
    problems = dict[int, str]()
    for position in samples.positions:
        if lacking[position]:
            problems[position] = f"reads {form.media}, and {_instead(form.media, kinds[position])}"
        elif form.scope == "groupwise" and task.samples[position].prompt in groups:
            problems[position] = f"reads {form.media} of whole groups, and another completion of its group has none"
    return ScorableSamples(tuple(one for one in samples.positions if one not in problems), problems)


def _instead(wanted: str, kind: str | None) -> str:
    """Return what a sample has in place of the media that a scorer reads, and what to do."""
    if kind is None:
        return "the completion has none; send them with it"
    if (wanted, kind) == ("pixels", "latents"):
        return "nothing decodes latents here: set reward.decoder.folders, or send pixels"
    return f"the completion has {kind}; send {wanted}"


def divided(
    task: ScoreTask, positions: tuple[int, ...], form: ScorerForm, batch_size: int
) -> Iterator[tuple[int, ...]]:
    """Yield the indices of the samples of each call, of those at `positions`."""
    if form.scope == "pointwise":
        for begin in range(0, len(positions), batch_size):
            yield positions[begin : begin + batch_size]
        return
    groups: dict[int, list[int]] = {}
    for position in positions:
        groups.setdefault(task.samples[position].prompt, []).append(position)
    yield from map(tuple, groups.values())
