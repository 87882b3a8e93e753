"""Check of the scorers of a recipe: each is loaded in a worker once, as the service will, before anything is scored."""

from __future__ import annotations

import select
import time
from collections.abc import Collection, Iterable
from dataclasses import replace

from starling.common.errors import ConfigError
from starling.common.sandbox.launch import Sandboxing, choose
from starling.reward.core.media import INPUTS, Input
from starling.reward.score.pool.forms import columns_of
from starling.reward.score.scorers.batch import ScorerForm
from starling.reward.score.workers.kinds import WorkerKind, kinds_of
from starling.reward.score.workers.process import WorkerProcess
from starling.reward.score.workers.protocol import WorkerReady, WorkerStartFailed
from starling.reward.settings import RewardSettings, ScorerSettings


def check_scorers(settings: RewardSettings, *, inputs: Collection[Input] = INPUTS) -> None:
    """Resolve every scorer in a worker process, as the service will. Raises ConfigError when one cannot be used.

    `inputs`: what samples may have; a scorer that reads something else would fail each of them.

    A message that no worker sends is not an error of the recipe: the pool quarantines the scorer that sent it.
    """
    sandboxing = choose(settings.sandbox)
    for kind in kinds_of(settings):
        problem = _problem_of(kind, sandboxing, settings, inputs=inputs)
        if problem and len(kind.scorers) > 1:  # one of them may have spoken for another
            alone = (replace(kind, scorers=(spec,)) for spec in kind.scorers)
            found = (_problem_of(one, sandboxing, settings, inputs=inputs) for one in alone)
            problem = next(filter(None, found), "")
        if problem:
            raise ConfigError(problem)


def _problem_of(
    kind: WorkerKind, sandboxing: Sandboxing, settings: RewardSettings, *, inputs: Collection[Input]
) -> str:
    """Return why the scorers of a kind cannot be used, in one sentence; empty if they can."""
    try:
        process = WorkerProcess(kind, sandboxing)
    except ConfigError as error:  # it names a value of `needs`, `python` or `device`, and not whose it is
        named = _named(kind, settings)
        return f"{named[0].upper()}{named[1:]}: {error}"
    try:
        return _await_ready(process, kind, settings, inputs=inputs)
    finally:
        process.end()


def _await_ready(
    process: WorkerProcess, kind: WorkerKind, settings: RewardSettings, *, inputs: Collection[Input]
) -> str:
    timeout_s = settings.start_timeout_s
    deadline = time.monotonic() + timeout_s
    poller = select.poll()
    poller.register(process, select.POLLIN)
    while (left_s := deadline - time.monotonic()) > 0:
        poller.poll(left_s * 1000)
        process.flush()
        for message in process.receive():
            if isinstance(message, WorkerStartFailed):
                return message.problem
            if isinstance(message, WorkerReady):
                return _problem_of_forms(message.forms, kind, settings, inputs=inputs)
        if process.ended:
            exit = process.exit_description()
            if exit.cause == "memory":
                return f"Importing {_named(kind, settings)} exceeded the {exit.text}: raise memory_mb."
            return f"Importing {_named(kind, settings)} ended its process ({exit.text})."
    return (
        f"Importing {_named(kind, settings)} took longer than {timeout_s:g} s: make it import faster, or raise "
        "start_timeout_s."
    )


def _named(kind: WorkerKind, settings: RewardSettings) -> str:
    """Return the scorers of a kind as a sentence names them."""
    titles = [repr(settings.scorers[spec.index].title) for spec in kind.scorers]
    return f"scorer{'s' * (len(titles) > 1)} {', '.join(titles)}"


def _problem_of_forms(
    forms: Iterable[tuple[int, ScorerForm]], kind: WorkerKind, settings: RewardSettings, *, inputs: Collection[Input]
) -> str:
    known = {spec.index for spec in kind.scorers}
    try:
        for scorer, form in forms:
            if scorer in known:  # others are a scorer's, in the worker's name
                columns_of(settings.scorers[scorer], form)
                _check_reads(settings.scorers[scorer], form, inputs)
    except ConfigError as error:
        return str(error)
    return ""


def _check_reads(scorer: ScorerSettings, form: ScorerForm, inputs: Collection[Input]) -> None:
    """Raise ConfigError when a scorer could not score any completion."""
    if form.media in inputs or not scorer.weight or scorer.tasks:
        return
    if form.media == "pixels" and "latents" in inputs:
        raise ConfigError(
            f"Scorer {scorer.title!r} reads pixels, and nothing decodes the latents of a run with [diffusion]: set "
            "reward.decoder.folders, or remove it."
        )
    made = "are latents" if "latents" in inputs else "are texts unless it has [diffusion]"
    raise ConfigError(
        f"Scorer {scorer.title!r} reads {form.media}, and the completions of a run {made}: serve it over HTTP "
        "(`reward.http.enabled`), or remove it."
    )
