"""`starling reward replay`: score quarantined completions again, with the scorers of a recipe."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from starling.common.counts import counted
from starling.common.errors import ConfigError, StarlingError
from starling.common.observe.terminal import one_line
from starling.common.service import SECTIONS
from starling.common.settings import ServiceSettings, load
from starling.reward.core.media import MediaForm, MediaTensor
from starling.reward.core.samples import Score, ScoreTask, group_task
from starling.reward.cosmos_settings import translate
from starling.reward.score.pool.check import check_scorers
from starling.reward.score.pool.pool import ScoringPool
from starling.reward.score.workers.places import offsets_of, padded
from starling.reward.score.workers.shared import MediaMemory, TooManyBuffersError, raise_descriptor_limit
from starling.reward.settings import RewardSettings
from starling.reward.shell.quarantine import read_quarantined


class _Settings(ServiceSettings):
    reward: RewardSettings


def replay(argv: Sequence[str]) -> None:
    """Score the completions in files, those of one file together, and print a line for each.

    Raises:
        ConfigError: a file is none of a quarantine, its scorer is not in the recipe, or none can be used.
        StarlingError: one of them failed again.
    """
    parser = argparse.ArgumentParser(
        prog="starling reward replay",
        description="Score completions that a reward service gave up on again, with the scorers of the recipe.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a file of <run folder>/quarantine")
    parser.add_argument("--config", action="append", type=Path, required=True, metavar="FILE", help="the recipe")
    known, flags = parser.parse_known_args(list(argv))
    settings = load(_Settings, known.config, flags, others=SECTIONS, translate=translate).reward
    titles = [scorer.title for scorer in settings.scorers]
    raise_descriptor_limit()
    memory = MediaMemory()
    tasks: list[ScoreTask] = []
    for file in known.files:
        title, prompt, completions, media = read_quarantined(file)
        if title not in titles:
            raise ConfigError(f"{file} is of scorer {title!r}, and the recipe has {', '.join(titles)}; give its recipe")
        tensors = _shared(media, memory)
        tasks.append(group_task(str(file), enumerate(completions), prompt, (titles.index(title),), tensors))
    check_scorers(settings)
    num_failed, total = _score(tasks, settings), sum(len(task.samples) for task in tasks)
    if num_failed:
        raise StarlingError(f"{num_failed} of {counted(total, 'completion')} failed again")


def _shared(media: Sequence[tuple[MediaForm, memoryview]], memory: MediaMemory) -> tuple[MediaTensor, ...]:
    """Return the media of completions in one buffer. Raises ConfigError."""
    if not media:
        return ()
    offsets, _ = offsets_of(form.size_bytes for form, _ in media)
    try:
        buffer = memory.share(padded((data,) for _, data in media))
    except TooManyBuffersError as error:
        raise ConfigError(f"{error}; replay fewer files at a time") from None
    return tuple(MediaTensor(form, 1, buffer, offset) for (form, _), offset in zip(media, offsets, strict=True))


def _score(tasks: Sequence[ScoreTask], settings: RewardSettings) -> int:
    """Score each task, and print a line for each completion; return how many failed."""
    num_failed = 0
    with ScoringPool(settings) as pool:
        for task in tasks:
            pool.submit(task)
            scores: dict[int, Score] = {}
            while len(scores) < len(task.samples):
                scores |= {score.completion: score for score in pool.poll(settings.start_timeout_s)}
            for number, score in sorted(scores.items()):
                num_failed += score.value is None
                place = f" {number}" if len(scores) > 1 else ""
                found = one_line(score.problem) if score.value is None else score.value
                print(f"{task.id}{place}: {found}", flush=True)
    return num_failed
