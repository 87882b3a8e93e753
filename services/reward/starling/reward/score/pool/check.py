"""Check of the scorers of a recipe: each is loaded in a worker once, as the service will, before anything is scored."""

from __future__ import annotations

import select
import time
from collections.abc import Iterable
from dataclasses import replace

from starling.common.errors import ConfigError
from starling.common.sandbox.launch import Sandboxing, choose
from starling.reward.score.pool.forms import columns_of
from starling.reward.score.scorers.batch import ScorerForm
from starling.reward.score.workers.kinds import WorkerKind, kinds_of
from starling.reward.score.workers.process import WorkerProcess
from starling.reward.score.workers.protocol import WorkerReady, WorkerStartFailed
from starling.reward.settings import RewardSettings, ScorerSettings


def check_scorers(settings: RewardSettings, *, only_texts: bool = False) -> None:
    """Resolve every scorer in a worker process, as the service will. Raises ConfigError when one cannot be used.

    With `only_texts` no sample will have media, so that a scorer that reads some would fail each of them.

    A message that no worker sends is not an error of the recipe: the pool quarantines the scorer that sent it.
    """
    sandboxing = choose(settings.sandbox)
    for kind in kinds_of(settings):
        problem = _problem_of(kind, sandboxing, settings, only_texts=only_texts)
        if problem and len(kind.scorers) > 1:  # one of them may have spoken for another
            alone = (replace(kind, scorers=(spec,)) for spec in kind.scorers)
            found = (_problem_of(one, sandboxing, settings, only_texts=only_texts) for one in alone)
            problem = next(filter(None, found), "")
        if problem:
            raise ConfigError(problem)


def _problem_of(kind: WorkerKind, sandboxing: Sandboxing, settings: RewardSettings, *, only_texts: bool) -> str:
    """Return why the scorers of a kind cannot be used, in one sentence; empty if they can."""
    try:
        process = WorkerProcess(kind, sandboxing)
    except ConfigError as error:  # it names a value of `needs`, `python` or `device`, and not whose it is
        named = _named(kind, settings)
        return f"{named[0].upper()}{named[1:]}: {error}"
    try:
        return _await_ready(process, kind, settings, only_texts=only_texts)
    finally:
        process.end()


def _await_ready(process: WorkerProcess, kind: WorkerKind, settings: RewardSettings, *, only_texts: bool) -> str:
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
                return _problem_of_forms(message.forms, kind, settings, only_texts=only_texts)
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
    forms: Iterable[tuple[int, ScorerForm]], kind: WorkerKind, settings: RewardSettings, *, only_texts: bool
) -> str:
    known = {spec.index for spec in kind.scorers}
    try:
        for scorer, form in forms:
            if scorer in known:  # others are a scorer's, in the worker's name
                columns_of(settings.scorers[scorer], form)
                if only_texts:
                    _check_reads_texts(settings.scorers[scorer], form)
    except ConfigError as error:
        return str(error)
    return ""


def _check_reads_texts(scorer: ScorerSettings, form: ScorerForm) -> None:
    """Raise ConfigError when a scorer could not score any completion of a run."""
    if form.media != "text" and scorer.weight and not scorer.tasks:
        raise ConfigError(
            f"Scorer {scorer.title!r} reads {form.media}, and the completions of a run are texts: serve it over HTTP "
            "(`reward.http.enabled`), or remove it."
        )
