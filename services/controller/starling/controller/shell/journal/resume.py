"""Start of an incarnation of the controller: from an empty journal, or from that of a run to resume."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any

import msgspec
import structlog

from starling.common.counts import counted
from starling.common.errors import ConfigError
from starling.common.kinds import TRAINED_PHASES
from starling.controller.core.compaction import compact
from starling.controller.core.groups.digest import digest_of_prompts
from starling.controller.core.plan import RunPlan
from starling.controller.core.records import (
    ControllerStarted,
    DataRead,
    EvaluationClosed,
    MetricsSummary,
    Record,
    RunBegun,
    StateCompacted,
    StepCommitted,
    StepFrozen,
)
from starling.controller.core.recovery import restore
from starling.controller.core.state import ControllerState
from starling.controller.data.load import RunData
from starling.controller.shell.journal.journal import Journal, StateTooLargeError

JOURNAL = "journal.sqlite"
LATER_FILES = ("metrics.jsonl", "events-*.rec", "samples.jsonl", "trajectories/*", "states/version-*/*")
"""Files in the folder of a run that exist, and are not empty, only after records of its journal are durable."""
NUM_CHECKED_STEPS = 64
"""Frozen steps whose prompts are compared with the data. Those of all steps follow from the same rows and seed."""

log = structlog.get_logger(__name__)


def start_incarnation(journal: Journal, run: str, plan: RunPlan) -> int:
    """Append a `ControllerStarted` to the journal, which the caller commits.

    Returns its number, counted from 1 over the life of the run.

    Raises:
        ConfigError: the journal is of another run, or of a run with other settings.
    """
    begun: RunBegun | None = None
    number, present = 1, plan.journaled()
    for record in journal.records():
        match record:
            case RunBegun() if begun is None:
                begun = record
            case ControllerStarted(incarnation=earlier) | StateCompacted(incarnation=earlier):
                number = max(number, earlier + 1)
    if begun is None:
        journal.append(RunBegun(run=run, plan=present))
    else:
        _check_same_run(journal.path, begun, run, present)
    journal.append(ControllerStarted(incarnation=number))
    return number


def compact_long(journal: Journal, state: ControllerState, data: DataRead | None, metrics: MetricsSummary) -> None:
    """Compact a journal that has become long without a compaction, as those of older versions have.

    It is read as a stream, because it may not fit into memory. Nothing may be pending.

    Args:
        journal: of the run.
        state: a fresh one, of which nothing is used later.
        data: of the run, as it was read.
        metrics: of metrics.jsonl, which has the lines of all records so far.
    """
    restore(state, journal.read())
    record = compact(state)
    if record is not None:
        try:
            journal.compact(msgspec.structs.replace(record, data=data, metrics=metrics))
        except StateTooLargeError as error:
            log.warning("not_compacted", reason=str(error))


def missing_lines(records: Iterable[Record], written: Set[tuple[str, int]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield kind and fields of the lines about steps and evaluations that metrics.jsonl lacks.

    They are committed to the journal first; a crash, also one between two lines of one step, or a full disk may keep
    them out of metrics.jsonl.

    Args:
        records: of the journal. The journal is compacted only when metrics.jsonl has all lines up to there.
        written: kind of a line, and its step, or for an evaluation how many there were before it.
    """
    prompts: dict[int, tuple[str, ...]] = {}
    num_evaluations = 0
    for record in records:
        match record:
            case StateCompacted(buffer=buffer, metrics=metrics):
                prompts |= {frozen.step: frozen.prompts for frozen in buffer.frozen}
                num_evaluations = metrics.num_evaluations if metrics is not None else 0
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


def check_journal_is_whole(path: Path, records: Iterable[Record], written: Set[tuple[str, int]]) -> None:
    """Compare the journal with the lines that metrics.jsonl has, which are written after their records are durable.

    A journal that lost its end, which only a disk that did not sync can cause, or an older copy of one, makes the later
    steps again; that is logged. Raises ConfigError when the journal is empty or missing and its folder has files of a
    run: it would begin anew, and overwrite them.
    """
    newest_line = max((step for kind, step in written if kind == "step"), default=0)
    num_records, newest_step = 0, 0
    for record in records:
        num_records += 1
        match record:
            case StepCommitted(step=step) | StateCompacted(version=step):
                newest_step = step
    if not num_records and (others := [name for name in LATER_FILES if _has_content(path.parent, name)]):
        what = f"metrics.jsonl in its folder has step {newest_line}" if newest_line else f"its folder has {others[0]}"
        raise ConfigError(
            f"{path} is empty or missing, but {what} of a run; restore the journal, or begin a new run in another "
            "folder"
        )
    if newest_line > newest_step:
        log.warning("journal_behind", step=newest_step, metrics_step=newest_line)


def _has_content(folder: Path, pattern: str) -> bool:
    return any(path.is_file() and path.stat().st_size for path in folder.glob(pattern))


def check_data(records: Iterable[Record], data: RunData, *, accept: bool) -> DataRead | None:
    """Compare the data with that of the journal, and the prompts of the newest frozen steps with the data.

    Journals of older versions hold no digests, and are accepted. Returns the record that is due, if there is one.
    Raises ConfigError when the data has changed, unless the changes are to be accepted.
    """
    present = data.read
    if present is None:
        return None
    known, frozen = _known_data(records)
    change = _change(known, frozen, present, data)
    if not change:
        return present if known is None else None
    if not accept:
        raise ConfigError(
            f"the data of this run has changed: {change}; restore it, or train on with the changed data by "
            "`starling run --resume RUN_FOLDER --accept-changed-data` (controller.accept_changed_data)"
        )
    log.warning("data_changed", reason=change)
    return msgspec.structs.replace(present, is_changed=True)


def _known_data(records: Iterable[Record]) -> tuple[DataRead | None, Sequence[StepFrozen]]:
    """Return what the journal says of the data, and the last steps that were frozen since it was read."""
    known, frozen = None, deque[StepFrozen](maxlen=NUM_CHECKED_STEPS)
    for record in records:
        match record:
            case DataRead():
                known = record
                if record.is_changed:
                    frozen.clear()
            case StateCompacted(data=data, buffer=buffer):
                known = data
                frozen.extend(buffer.frozen)
            case StepFrozen():
                frozen.append(record)
    return known, frozen


def _change(known: DataRead | None, frozen: Iterable[StepFrozen], present: DataRead, data: RunData) -> str:
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
    for record in frozen:
        if record.digest and digest_of_prompts(map(data.prompts.prompt, record.ordinals)) != record.digest:
            return f"step {record.step} was frozen with other prompts"
    return ""


def check_num_prompts(num: int, plan: RunPlan) -> None:
    """Raise ConfigError when a run that answers each prompt once now has fewer prompts than the `num` admitted ones."""
    if not plan.kind.trains and num > plan.num_prompts:
        raise ConfigError(
            f"this run has worked on {counted(num, 'prompt')}, and its data has only {plan.num_prompts} now; restore "
            "the data, or begin a new run"
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
