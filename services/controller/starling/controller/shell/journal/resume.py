"""Start of an incarnation of the controller: from an empty journal, or from that of a run to resume."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starling.common.errors import ConfigError
from starling.common.kinds import TRAINED_PHASES
from starling.controller.core.plan import RunPlan
from starling.controller.core.records import (
    ControllerStarted,
    EvaluationClosed,
    GroupsOpened,
    JournalEntry,
    RunBegun,
    StepCommitted,
    StepFrozen,
)
from starling.controller.shell.journal.journal import Journal

JOURNAL = "journal.sqlite"


@dataclass(frozen=True)
class Incarnation:
    """One process start of the controller."""

    number: int
    """Counted from 1 over the life of the run."""
    entries: list[JournalEntry]
    """The journal as this incarnation found it."""


def start_incarnation(journal: Journal, run: str, plan: RunPlan) -> Incarnation:
    """Read the journal, and append a `ControllerStarted` to it, which the caller commits.

    Raises:
        ConfigError: the journal is of another run, or of a run with other settings.
    """
    entries = list(journal.read())
    begun = next((entry.record for entry in entries if isinstance(entry.record, RunBegun)), None)
    present = plan.journaled()
    if begun is None:
        journal.append(RunBegun(run=run, plan=present))
    else:
        _check_same_run(journal.path, begun, run, present)
    earlier = [entry.record.incarnation for entry in entries if isinstance(entry.record, ControllerStarted)]
    number = max(earlier, default=0) + 1
    journal.append(ControllerStarted(incarnation=number))
    return Incarnation(number, entries)


def missing_lines(
    entries: Iterable[JournalEntry], written: Set[tuple[str, int]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield kind and fields of the lines about steps and evaluations that metrics.jsonl lacks.

    They are committed to the journal first; a crash, also one between two lines of one step, or a full disk may keep
    them out of metrics.jsonl.

    Args:
        entries: of the journal.
        written: kind of a line, and its step, or for an evaluation how many there were before it.
    """
    prompts: dict[int, tuple[str, ...]] = {}
    num_evaluations = 0
    for entry in entries:
        match entry.record:
            case StepFrozen(step=step, prompts=frozen):
                prompts[step] = frozen
            case StepCommitted(step=step, metrics=metrics):
                if ("step", step) not in written:
                    yield "step", {"step": step, **metrics}
                kind = "trained" if metrics.get("phase") in TRAINED_PHASES else "answered"
                if step in prompts and (kind, step) not in written:
                    yield kind, {"step": step, "prompts": prompts[step]}
            case EvaluationClosed(summary=summary):
                if ("evaluation", num_evaluations) not in written:
                    yield "evaluation", summary
                num_evaluations += 1


def check_num_prompts(entries: Iterable[JournalEntry], plan: RunPlan) -> None:
    """Raise ConfigError when a run that answers each prompt once now has fewer prompts than it has worked on."""
    num = sum(entry.record.num for entry in entries if isinstance(entry.record, GroupsOpened))
    if not plan.kind.trains and num > plan.num_prompts:
        raise ConfigError(
            f"this run has worked on {num} prompts, and its data has only {plan.num_prompts} now; restore the data, or "
            "begin a new run"
        )


def _check_same_run(path: Path, begun: RunBegun, run: str, present: dict[str, object]) -> None:
    if begun.run != run:
        raise ConfigError(
            f"{path} is the journal of run {begun.run}, not of {run}; give this run another folder with --dir"
        )
    for name, value in begun.plan.items():
        if present.get(name, value) != value:
            raise ConfigError(
                f"the run of {path} began with {name} = {value}, and now it is {present[name]}; "
                "restore the setting, or begin a new run"
            )
