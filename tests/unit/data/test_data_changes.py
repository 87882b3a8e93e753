"""Data that changed since a run began: it is noticed when the run resumes, and used only if that is asked for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import structlog
from transcript import SMALL, Stream

from starling.common.errors import ConfigError
from starling.common.wire.messages import Status, TrajectoryMeta
from starling.controller.core.groups.digest import digest_of_prompts
from starling.controller.core.groups.group import GroupState
from starling.controller.core.machine import Controller
from starling.controller.core.records import (
    CompletionsStored,
    ControllerStarted,
    DataRead,
    GroupsOpened,
    JournalEntry,
    Record,
    RewardsStored,
    StepCommitted,
    StepFrozen,
)
from starling.controller.data.load import RunData, load_data
from starling.controller.data.sources import commit_of
from starling.controller.settings import ControllerProcess
from starling.controller.shell.journal.resume import check_data

ROWS = [{"question": f"q{n}", "answer": f"a{n}"} for n in range(20)]
CHANGED = [*ROWS[:5], {"question": "q5", "answer": "another"}, *ROWS[6:]]


def read(folder: Path, rows: list[dict[str, str]] = ROWS, *, name: str = "rows.jsonl", **data: Any) -> RunData:
    """Write rows, and read them as a run does."""
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"source": str(folder / name), "held_out": 2, **data}
    return load_data(ControllerProcess.model_validate({"data": settings, "sft": {"num_steps": 1}}))


def journal_of(data: RunData, *frozen: StepFrozen) -> list[Record]:
    """Return the records of a run that has read `data`."""
    assert data.read is not None
    return [ControllerStarted(incarnation=1), data.read, *frozen]


def frozen_of(data: RunData, step: int, *ordinals: int) -> StepFrozen:
    """Return the record of a step that trains these prompts."""
    prompts = [data.prompts.prompt(ordinal) for ordinal in ordinals]
    ids = tuple(prompt.id for prompt in prompts)
    return StepFrozen(step=step, ordinals=ordinals, prompts=ids, digest=digest_of_prompts(prompts))


def test_data_that_is_read_again_is_the_same(tmp_path: Path) -> None:
    data = read(tmp_path)
    assert check_data(journal_of(data, frozen_of(data, 2, 0, 1, 25)), read(tmp_path), accept=False) is None


def test_data_that_was_moved_is_the_same(tmp_path: Path) -> None:
    assert check_data(journal_of(read(tmp_path)), read(tmp_path, name="moved.jsonl"), accept=False) is None


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"rows": CHANGED}, "its rows, or their order, differ from those that it began with"),
        ({"rows": ROWS[::-1]}, "its rows, or their order, differ"),
        ({"seed": 1}, "its rows, or their order, differ"),
        ({"held_out": 3, "rows": [*ROWS, ROWS[0]]}, "its number of rows was 20, and now it is 21"),
        ({"rows": [*ROWS, {"question": "q", "answer": "a"}]}, "its number of rows was 20, and now it is 21"),
        ({"rows": CHANGED, "name": "other.jsonl"}, "data.source was .*rows.jsonl, and now it is .*other.jsonl"),
    ],
)
def test_changed_data_is_refused(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    records = journal_of(read(tmp_path))
    with pytest.raises(
        ConfigError, match=rf"^the data of this run has changed: {complaint}.*; restore it, or train on"
    ):
        check_data(records, read(tmp_path, **changes), accept=False)


def test_changed_data_is_accepted_once_if_that_is_asked_for(tmp_path: Path) -> None:
    data = read(tmp_path)
    records = journal_of(data, frozen_of(data, 2, 4, 5, 6))
    changed = read(tmp_path, CHANGED)
    with structlog.testing.capture_logs() as logs:
        record = check_data(records, changed, accept=True)
    assert record is not None
    assert record.is_changed
    assert [line["event"] for line in logs] == ["data_changed"]
    records.append(record)
    assert check_data(records, changed, accept=False) is None, "the steps before were frozen with other prompts"
    with pytest.raises(ConfigError, match="the data of this run has changed"):
        check_data(records, read(tmp_path), accept=False)


def test_frozen_steps_are_compared_with_their_prompts(tmp_path: Path) -> None:
    """Equal rows in another order, which another version of a library may draw for a later epoch."""
    data = read(tmp_path)
    frozen = StepFrozen(step=7, ordinals=(40, 41), prompts=("a", "b"), digest=digest_of_prompts([]))
    with pytest.raises(ConfigError, match="has changed: step 7 was frozen with other prompts; restore it"):
        check_data(journal_of(data, frozen), data, accept=False)


def test_journal_without_digests_is_accepted(tmp_path: Path) -> None:
    data = read(tmp_path)
    old = [StepFrozen(step=2, ordinals=(0, 1), prompts=("x", "y"))]
    assert check_data(old, data, accept=False) == data.read, "it is noted from now on"


def test_digest_of_a_run_without_a_policy_and_of_one_that_serves(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = {"source": str(tmp_path / "rows.jsonl")}
    infer, serve = (
        load_data(ControllerProcess.model_validate({"run": {"kind": kind}, "data": data}))
        for kind in ("infer", "serve")
    )
    assert infer.read is not None
    assert infer.read.num_rows == 20
    assert serve.read is None
    assert check_data([], serve, accept=False) is None


def test_commit_of_downloaded_files() -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    assert commit_of(["/tmp/a.json", f"hf://datasets/a/b@{commit}/train.parquet"]) == commit
    assert commit_of([]) == ""


def completed(key: str) -> list[Record]:
    """Return the records of a group that is generated and scored."""
    one = TrajectoryMeta(status=Status.OK, num_tokens=2, text="", oldest_version=0, newest_version=0)
    stored = CompletionsStored(key=key, trajectories=(one, one), tensors=())
    return [stored, RewardsStored(key=key, rewards=(0.0, 1.0))]


def restored(records: list[Record]) -> dict[int, GroupState]:
    """Return the states of the groups of a controller that restarts from these records."""
    journal = [JournalEntry(record) for record in records]
    plan = dataclasses.replace(SMALL, max_staleness=1)
    controller = Controller(plan, Stream("train"), Stream("sft"), (), journal=journal, incarnation=2)
    return {group.ordinal: group.state for group in controller.state.buffer.live()}


def test_groups_that_no_step_has_taken_are_generated_again() -> None:
    records: list[Record] = [GroupsOpened(first=0, num=4), *completed("t0"), *completed("t1")]
    records += [StepFrozen(step=1, ordinals=(0, 1), prompts=("a", "b")), *completed("t2"), completed("t3")[0]]
    frozen, waiting = GroupState.FROZEN, GroupState.WAITING
    assert restored(records) == {0: frozen, 1: frozen, 2: GroupState.SCORED, 3: GroupState.GENERATED}
    records.append(DataRead(digest="d", num_rows=1, is_changed=True))
    assert restored(records) == {0: frozen, 1: frozen, 2: waiting, 3: waiting}
    records += [*completed("t2"), *completed("t3"), StepCommitted(step=1)]
    records.append(StepFrozen(step=2, ordinals=(2, 3), prompts=("c", "d")))
    assert restored(records) == dict.fromkeys(range(4), frozen)
