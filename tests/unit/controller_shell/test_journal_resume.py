"""What a controller finds in its journal when it begins, and what it makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from starling.common.errors import ConfigError
from starling.common.wire.messages import Sampling
from starling.controller.core.kinds import INFER
from starling.controller.core.plan import RunPlan
from starling.controller.core.records import (
    ControllerStarted,
    GroupsOpened,
    JournalEntry,
    RunBegun,
    StepCommitted,
    StepFrozen,
)
from starling.controller.shell.journal.journal import Journal
from starling.controller.shell.journal.resume import check_num_prompts, missing_lines, start_incarnation

PLAN = RunPlan(seed=3, sampling=Sampling(max_tokens=4), eval_sampling=Sampling(max_tokens=4), num_steps=5)


def taken_up(path: Path, run: str = "r", plan: RunPlan = PLAN) -> int:
    """Take up the journal at `path`, and return the incarnation."""
    journal = Journal(path)
    try:
        past = start_incarnation(journal, run, plan)
        journal.commit()
        return past.number
    finally:
        journal.close()


def test_every_beginning_is_another_incarnation(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    assert [taken_up(path) for _ in range(3)] == [1, 2, 3]
    journal = Journal(path)
    records = [kept.record for kept in journal.read()]
    journal.close()
    assert isinstance(records[0], RunBegun)
    assert records[1:] == [ControllerStarted(incarnation=number) for number in (1, 2, 3)]


def test_the_journal_of_another_run_is_not_taken_up(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    taken_up(path)
    with pytest.raises(ConfigError, match="is the journal of run r, not of s; give this run another folder"):
        taken_up(path, "s")


def test_what_the_journal_counts_by_may_not_change_and_the_rest_may(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    taken_up(path)
    assert taken_up(path, plan=replace(PLAN, num_steps=50, max_staleness=3)) == 2
    with pytest.raises(ConfigError, match="began with prompts_per_step = 1, and now it is 2"):
        taken_up(path, plan=replace(PLAN, prompts_per_step=2))


def test_steps_that_are_not_in_the_metrics_are_told_again() -> None:
    records = [
        JournalEntry(StepCommitted(step=1, metrics={"phase": "sft", "loss": 2.0})),
        JournalEntry(StepFrozen(step=2, ordinals=(0,), prompts=("p0",))),
        JournalEntry(StepCommitted(step=2, metrics={"phase": "rl", "loss": 1.0})),
        JournalEntry(StepFrozen(step=3, ordinals=(1,), prompts=("p1",))),
    ]
    assert list(missing_lines(records, {1})) == [
        {"kind": "step", "step": 2, "phase": "rl", "loss": 1.0},
        {"kind": "trained", "step": 2, "prompts": ("p0",)},
    ]
    assert [line["step"] for line in missing_lines(records, set())] == [1, 2, 2]


def test_files_of_a_run_without_a_policy_are_told_as_such() -> None:
    records = [
        JournalEntry(StepFrozen(step=1, ordinals=(0,), prompts=("p0",))),
        JournalEntry(StepCommitted(step=1, metrics={"phase": "infer"})),
    ]
    assert [line["kind"] for line in missing_lines(records, set())] == ["step", "answered"]


def test_prompts_that_are_there_no_more_are_missed_before_anything_is_done() -> None:
    opened = [JournalEntry(GroupsOpened(first=0, num=3)), JournalEntry(GroupsOpened(first=3, num=2))]
    plan = replace(PLAN, kind=INFER, num_prompts=5)
    check_num_prompts(opened, plan)
    check_num_prompts(opened, PLAN)
    with pytest.raises(ConfigError, match="has worked on 5 prompts, and its data has only 4 now; restore the data"):
        check_num_prompts(opened, replace(plan, num_prompts=4))
