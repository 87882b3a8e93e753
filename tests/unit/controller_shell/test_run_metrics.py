"""Metrics of a run from its notes, and the lag of its journal."""

from __future__ import annotations

from pathlib import Path

from recorded_run import PLAN

from starling.common.observe.metrics import render
from starling.controller.core.events import Write
from starling.controller.core.lifecycle.stages import Lifecycle, RunStage
from starling.controller.core.records import GroupsOpened
from starling.controller.core.state import ControllerState, RunPrompts
from starling.controller.shell.journal.commit_queue import CommitQueue
from starling.controller.shell.journal.journal import Journal
from starling.controller.shell.metrics.families import FAMILIES
from starling.controller.shell.metrics.notes import RunNotes, left_reason
from starling.controller.shell.metrics.run_metrics import MAX_UNSPREAD, RunMetrics

STEP = {
    "step": 3,
    "reward_mean": 0.5,
    "num_tokens": 40,
    "time/step_s": 2.0,
    "time/forward_s": 1.5,
    "skipped_step": 0.0,
    "score/length": 0.25,
    "env/turns": 4.0,
    "staleness/1": 0.75,
    "loss": float("nan"),
    "alarms": [{"name": "entropy"}],
}


def value(notes: RunNotes, name: str, /, **labels: str) -> float | None:
    return notes.samples().get((name, tuple(labels.items())))


def test_counters_begin_at_0_and_gauges_with_the_last_step_before() -> None:
    notes = RunNotes(STEP, {"version": 2, "reward_mean": 0.1})
    assert value(notes, "starling_steps_total") == 0.0
    assert value(notes, "starling_step_reward_mean") == 0.5
    assert value(notes, "starling_evaluation_version") == 2
    assert value(notes, "starling_step_loss") is None, "NaN is no value of a step that Prometheus should keep"


def test_notes_of_steps_add_up_and_show_the_last_one() -> None:
    notes = RunNotes({}, {})
    notes.add("step", STEP)
    notes.add("step", {**STEP, "step": 4, "reward_mean": 0.75, "skipped_step": 1.0})
    assert value(notes, "starling_steps_total") == 2
    assert value(notes, "starling_steps_skipped_total") == 1
    assert value(notes, "starling_step_tokens_total") == 80
    assert value(notes, "starling_step_time_seconds_total", phase="forward") == 3.0
    assert value(notes, "starling_step_reward_mean") == 0.75
    assert value(notes, "starling_step_score", scorer="length") == 0.25
    assert value(notes, "starling_step_env", name="turns") == 4.0
    assert value(notes, "starling_step_staleness_ratio", age="1") == 0.75


def test_replicas_that_leave_are_counted_by_reason() -> None:
    notes = RunNotes({}, {})
    for reason in ("its connection closed", "rollout-1 did not answer g1 within 3 s", "it left: stopped by SIGTERM"):
        notes.add("left", {"replica": "rollout-1", "reason": reason})
    for reason in ("disconnected", "evicted", "left"):
        assert value(notes, "starling_replicas_left_total", role="rollout", reason=reason) == 1


def test_reasons_are_those_of_the_core() -> None:
    """The beginnings of the texts stand in the core; one that is changed there must be changed in the table."""
    folder = Path(__file__).parents[3] / "services/controller/starling/controller/core"
    texts = "".join(path.read_text() for path in folder.rglob("*.py"))
    from starling.controller.shell.metrics.families import LEFT_REASONS

    assert [begin for begin in LEFT_REASONS if begin not in texts] == []
    assert left_reason("anything else") == "evicted"


def test_hostile_notes_give_no_sample() -> None:
    notes = RunNotes({}, {})
    notes.add("step", {"loss": "1", "reward_mean": None, "time/step_s": float("inf"), "num_tokens": [1]})
    notes.add("adopted", {"replica": 3, "pull_s": "long"})
    text = render(FAMILIES, notes.samples())
    assert "\nstarling_step_loss " not in text
    assert "starling_step_seconds_total 0.0" in text


def test_outcome_of_a_run_is_known_from_its_stop_its_failure_or_its_drain() -> None:
    running, stopped, failed = (Lifecycle(drain_s=1.0, stop_s=1.0) for _ in range(3))
    assert running.outcome == ""
    running.drain(0.0)
    assert running.outcome == "complete"
    stopped.stop("an operator", 0.0)
    assert stopped.outcome == "stopped"
    failed.fail("no rollout", 0.0)
    assert failed.stage is RunStage.DRAINING
    assert failed.outcome == "failed"


def test_commit_queue_measures_how_long_records_wait(tmp_path: Path) -> None:
    journal, lags = Journal(tmp_path / "journal.sqlite"), list[float]()
    queue = CommitQueue(journal, lambda command, cause: None, full_timeout_s=1.0, on_full=lambda left_s: None)
    queue.add(Write(GroupsOpened(first=0, num=1)), "")
    queue.flush()
    assert (queue.waiting_s, lags) == (0.0, []), "nothing is measured where nobody asks"
    queue.on_commit = lags.append
    queue.add(Write(GroupsOpened(first=1, num=1)), "")
    first = queue.waiting_s
    queue.add(Write(GroupsOpened(first=2, num=1)), "")
    assert queue.waiting_s >= first > 0.0
    queue.flush()
    assert queue.waiting_s == 0.0
    assert len(lags) == 1
    assert lags[0] >= first
    queue.flush()
    assert len(lags) == 1, "an empty commit is no measurement"
    journal.close()


def test_adoptions_are_counted_of_the_newest_publications_only(tmp_path: Path) -> None:
    """A long run has any number of versions, and replicas adopt some of them late."""
    metrics = RunMetrics(tmp_path / "journal", {}, {}, 1)
    state = ControllerState(PLAN, RunPrompts(None, None, ()), 1)
    for version in range(4 * MAX_UNSPREAD):
        metrics.add("published", {"version": version}, state)
        for adopted in (version, max(0, version - 2 * MAX_UNSPREAD)):
            metrics.add("adopted", {"version": adopted, "replica": "rollout-0", "pull_s": 0.1}, state)
    assert len(metrics._num_adopted) <= MAX_UNSPREAD
