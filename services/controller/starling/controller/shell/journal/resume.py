"""What a controller finds when it begins: an empty journal, or that of a run to take up again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starling.common.errors import ConfigError
from starling.controller.core.plan import RESUMED_WITH, TRAINING, RunPlan
from starling.controller.core.records import (
    ControllerStarted,
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
    """The records of a journal, and which incarnation of the controller reads them."""

    records: list[JournalEntry]
    incarnation: int


def start_incarnation(journal: Journal, run: str, plan: RunPlan) -> Incarnation:
    """Read the journal, and append to it that another incarnation has begun; the caller commits that.

    Raises:
        ConfigError: it is of another run, or of a run by other settings.
    """
    records = list(journal.read())
    begun = next((kept.record for kept in records if isinstance(kept.record, RunBegun)), None)
    present: dict[str, object] = {name: getattr(plan, name) for name in RESUMED_WITH}
    if begun is None:
        journal.append(RunBegun(run=run, plan=present))
    else:
        _check(journal.path, begun, run, present)
    earlier = [kept.record.incarnation for kept in records if isinstance(kept.record, ControllerStarted)]
    incarnation = max(earlier, default=0) + 1
    journal.append(ControllerStarted(incarnation=incarnation))
    return Incarnation(records, incarnation)


def lost_lines(records: Iterable[JournalEntry], told: Set[int]) -> Iterator[dict[str, Any]]:
    """Return the lines of metrics.jsonl of the steps that are not `told` there.

    A step is in the journal before it is in that file, which a full disk, or a death in between, may keep it out of.
    """
    prompts: dict[int, tuple[str, ...]] = {}
    for kept in records:
        match kept.record:
            case StepFrozen(step=step, prompts=sealed):
                prompts[step] = sealed
            case StepCommitted(step=step, metrics=metrics) if step not in told:
                yield {"kind": "step", "step": step, **metrics}
                if step in prompts:
                    done = "trained" if metrics.get("phase") in TRAINING else "answered"
                    yield {"kind": done, "step": step, "prompts": prompts[step]}


def check_prompts(records: Iterable[JournalEntry], plan: RunPlan) -> None:
    """Raise ConfigError when a run that answers each prompt once has lost some that it has worked on."""
    num = sum(kept.record.num for kept in records if isinstance(kept.record, GroupsOpened))
    if not plan.has_policy and num > plan.num_prompts:
        raise ConfigError(
            f"{num} prompts of this run were worked on, and its data has {plan.num_prompts} now; restore it, or begin "
            "the run anew"
        )


def _check(path: Path, begun: RunBegun, run: str, present: dict[str, object]) -> None:
    if begun.run != run:
        raise ConfigError(
            f"{path} is the journal of run {begun.run}, and this is {run}; give this run a folder of its own with --dir"
        )
    for name, value in begun.plan.items():
        if present.get(name, value) != value:
            raise ConfigError(
                f"the run of {path} began with {name} = {value}, and now it is {present[name]}; "
                "take it up with what it began with, or start another run"
            )
