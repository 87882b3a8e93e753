"""Start of an incarnation of the controller: from an empty journal, or from that of a run to resume."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import structlog

from starling.common.errors import ConfigError
from starling.common.kinds import TRAINED_PHASES
from starling.controller.core.groups.digest import digest_of_prompts
from starling.controller.core.plan import RunPlan
from starling.controller.core.records import (
    ControllerStarted,
    DataRead,
    EvaluationClosed,
    GroupsOpened,
    JournalEntry,
    Record,
    RunBegun,
    StepCommitted,
    StepFrozen,
)
from starling.controller.data.load import RunData
from starling.controller.shell.journal.journal import Journal

JOURNAL = "journal.sqlite"
NUM_CHECKED_STEPS = 64
"""Frozen steps whose prompts are compared with the data. Those of all steps follow from the same rows and seed."""

log = structlog.get_logger(__name__)


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


def check_journal_is_whole(path: Path, entries: Sequence[JournalEntry], written: Set[tuple[str, int]]) -> None:
    """Compare the journal with the lines that metrics.jsonl has, which are written after their records are durable.

    A journal that lost its end, which only a disk that did not sync can cause, or an older copy of one, makes the later
    steps again; that is logged. Raises ConfigError when the journal of a run that has made steps is empty.
    """
    newest_line = max((step for kind, step in written if kind == "step"), default=0)
    steps = [entry.record.step for entry in entries if isinstance(entry.record, StepCommitted)]
    if newest_line and not entries:
        raise ConfigError(
            f"{path} is empty, and metrics.jsonl beside it has step {newest_line}; restore the journal, or begin a new "
            "run in another folder"
        )
    if newest_line > max(steps, default=0):
        log.warning("journal_behind", step=max(steps, default=0), metrics_step=newest_line)


def check_data(entries: Sequence[JournalEntry], data: RunData, *, accept: bool) -> DataRead | None:
    """Compare the data with that of the journal, and the prompts of the newest frozen steps with the data.

    Journals of older versions hold no digests, and are accepted. Returns the record that is due, if there is one.
    Raises ConfigError when the data has changed, unless the changes are to be accepted.
    """
    present = data.read
    if present is None:
        return None
    records = [entry.record for entry in entries]
    known = next((record for record in reversed(records) if isinstance(record, DataRead)), None)
    change = _change(records, known, present, data)
    if not change:
        return present if known is None else None
    if not accept:
        raise ConfigError(
            f"the data of this run has changed: {change}; restore it, or train on with the changed data by "
            "`starling run --resume RUN_FOLDER --accept-changed-data` (controller.accept_changed_data)"
        )
    log.warning("data_changed", reason=change)
    return msgspec.structs.replace(present, is_changed=True)


def _change(records: Sequence[Record], known: DataRead | None, present: DataRead, data: RunData) -> str:
    """Return in words what has changed, nothing if all is as it was."""
    if known is not None and known.digest != present.digest:
        for name, before, now in (
            ("data.source", known.source, present.source),
            ("its revision", known.revision, present.revision),
            ("its number of rows", known.num_rows, present.num_rows),
        ):
            if before != now:
                return f"{name} was {before}, and now it is {now}"
        return "its rows, or their order, differ from those that it began with"
    begin = next((n for n, record in enumerate(reversed(records)) if _is_changed(record)), len(records))
    frozen = [record for record in records[len(records) - begin :] if isinstance(record, StepFrozen) and record.digest]
    for record in frozen[-NUM_CHECKED_STEPS:]:
        if digest_of_prompts(map(data.prompts.prompt, record.ordinals)) != record.digest:
            return f"step {record.step} was frozen with other prompts"
    return ""


def _is_changed(record: Record) -> bool:
    return isinstance(record, DataRead) and record.is_changed


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
