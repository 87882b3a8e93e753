"""Start of an incarnation of the controller from an existing journal."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import structlog

from starling.common.errors import ConfigError
from starling.common.kinds import INFER
from starling.common.wire.messages import Sampling
from starling.controller.core.plan import RunPlan
from starling.controller.core.records import (
    ControllerStarted,
    EvaluationClosed,
    RunBegun,
    StepCommitted,
    StepFrozen,
)
from starling.controller.shell.journal.journal import Journal
from starling.controller.shell.journal.resume import (
    check_journal_is_whole,
    check_num_prompts,
    missing_lines,
    start_incarnation,
)
from starling.controller.shell.status import MetricsHistory

PLAN = RunPlan(seed=3, sampling=Sampling(max_tokens=4), eval_sampling=Sampling(max_tokens=4), num_steps=5)


def resume(path: Path, run: str = "r", plan: RunPlan = PLAN) -> int:
    """Start an incarnation on the journal at `path`, and return it."""
    journal = Journal(path)
    try:
        number = start_incarnation(journal, run, plan)
        journal.commit()
        return number
    finally:
        journal.close()


def test_start_incarnation_counts_up(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    assert [resume(path) for _ in range(3)] == [1, 2, 3]
    journal = Journal(path)
    records = [kept.record for kept in journal.read()]
    journal.close()
    assert isinstance(records[0], RunBegun)
    assert records[1:] == [ControllerStarted(incarnation=number) for number in (1, 2, 3)]


def test_start_incarnation_rejects_another_run(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    resume(path)
    with pytest.raises(ConfigError, match="is the journal of run r, not of s; give this run another folder"):
        resume(path, "s")


def test_start_incarnation_rejects_changed_plan_numbers(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    resume(path)
    assert resume(path, plan=replace(PLAN, num_steps=50, max_staleness=3)) == 2
    with pytest.raises(ConfigError, match="began with prompts_per_step = 1, and now it is 2"):
        resume(path, plan=replace(PLAN, prompts_per_step=2))


def test_missing_lines_of_steps() -> None:
    records = [
        StepCommitted(step=1, metrics={"phase": "sft", "loss": 2.0}),
        StepFrozen(step=2, ordinals=(0,), prompts=("p0",)),
        StepCommitted(step=2, metrics={"phase": "rl", "loss": 1.0}),
        StepFrozen(step=3, ordinals=(1,), prompts=("p1",)),
    ]
    step = "step", {"step": 2, "phase": "rl", "loss": 1.0}
    trained = "trained", {"step": 2, "prompts": ("p0",)}
    assert list(missing_lines(records, {("step", 1)})) == [step, trained]
    assert list(missing_lines(records, {("step", 1), ("step", 2)})) == [trained], (
        "the controller was killed between the two lines"
    )
    assert list(missing_lines(records, {("step", 1), ("step", 2), ("trained", 2)})) == []
    assert [fields["step"] for _, fields in missing_lines(records, set())] == [1, 2, 2]


def test_missing_lines_of_evaluations() -> None:
    records = [EvaluationClosed(number=number, summary={"version": 7}) for number in (3, 4)]
    line = "evaluation", {"version": 7}
    assert list(missing_lines(records, set())) == [line, line]
    assert list(missing_lines(records, {("evaluation", 0)})) == [line]
    assert list(missing_lines(records, {("evaluation", 0), ("evaluation", 1)})) == []


def test_written_lines_are_the_lines_of_steps_and_evaluations(tmp_path: Path) -> None:
    lines = [
        {"kind": "joined", "replica": "rollout-0"},
        {"kind": "step", "step": 1, "loss": 2.0},
        {"kind": "evaluation", "version": 1, "step": 9},
        {"kind": "step", "step": 2, "loss": 1.0},
        {"kind": "trained", "step": 2, "prompts": ["p0"]},
        {"kind": "evaluation", "version": 2},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "step", "st')
    written = {("step", 1), ("evaluation", 0), ("step", 2), ("trained", 2), ("evaluation", 1)}
    assert MetricsHistory(0.0).read(path) == written


DAMAGED = (
    b'{"kind": "step", "st{"kind": "step", "step": 2}\n',
    b"\0" * 4096 + b"\n",
    b'{"kind": "step", "step": "\xff\xfe"}\n',
    b"[" * 100_000 + b"\n",
    b'["step", 2]\n',
    b'{"step": 2}\n',
    b'{"kind": "step", "step": 2}',
)
"""Lines that a power cut, or a controller that wrote on after one, left in metrics.jsonl."""


@pytest.mark.parametrize("damaged", DAMAGED)
def test_written_lines_skip_and_count_damaged_ones(tmp_path: Path, damaged: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "step", "step": 1, "loss": 2.0}\n' + damaged)
    history = MetricsHistory(0.0)
    with structlog.testing.capture_logs() as logs:
        assert history.read(path) == {("step", 1)}
    assert history.step == {"step": 1, "loss": 2.0}
    assert logs == [{"event": "lines_skipped", "log_level": "warning", "file": str(path), "lines": 1}]


def test_missing_lines_of_files() -> None:
    records = [
        StepFrozen(step=1, ordinals=(0,), prompts=("p0",)),
        StepCommitted(step=1, metrics={"phase": "infer"}),
    ]
    assert [kind for kind, _ in missing_lines(records, set())] == ["step", "answered"]


def test_journal_that_is_empty_after_steps_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "step": 7}\n')
    with pytest.raises(
        ConfigError, match=r"empty or missing, but metrics\.jsonl in its folder has step 7 of a run; res"
    ):
        check_journal_is_whole(path, [], {("step", 3), ("step", 7), ("trained", 7)})


@pytest.mark.parametrize(
    "name",
    [
        "metrics.jsonl",
        "events-2.rec",
        "samples.jsonl",
        "trajectories/step-000001.msgpack",
        "states/version-2/state.json",
    ],
)
def test_empty_journal_beside_files_of_a_run_is_rejected(tmp_path: Path, name: str) -> None:
    path, other = tmp_path / "journal.sqlite", tmp_path / name
    other.parent.mkdir(parents=True, exist_ok=True)
    other.touch()
    check_journal_is_whole(path, [], set())
    other.write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"is empty or missing, but its folder has .* of a run; restore the journal"):
        check_journal_is_whole(path, [], set())
    check_journal_is_whole(path, [ControllerStarted(incarnation=1)], set())


def test_journal_that_lost_its_end_is_logged(tmp_path: Path) -> None:
    records = [StepCommitted(step=1), StepCommitted(step=2)]
    for newest, warnings in ((2, []), (3, [{"event": "journal_behind", "step": 2, "metrics_step": 3}])):
        with structlog.testing.capture_logs() as logs:
            check_journal_is_whole(tmp_path, records, {("step", 1), ("step", newest)})
        assert logs == [{**one, "log_level": "warning"} for one in warnings]


def test_check_num_prompts_rejects_missing_prompts() -> None:
    plan = replace(PLAN, kind=INFER, num_prompts=5)
    check_num_prompts(5, plan)
    check_num_prompts(5, PLAN)
    with pytest.raises(ConfigError, match="has worked on 5 prompts, and its data has only 4 now; restore the data"):
        check_num_prompts(5, replace(plan, num_prompts=4))
