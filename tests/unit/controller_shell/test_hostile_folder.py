"""Files of the controller in a folder that comes from others: links and FIFOs, and lines of metrics of other types."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from recorded_run import HELD_OUT, PLAN
from rich.console import Console

from starling.cli.recipe.schema import Recipe
from starling.cli.run.screen import LiveScreen, PlainScreen
from starling.common.errors import ConfigError
from starling.common.files import open_own
from starling.common.wire.telemetry import RunSnapshot
from starling.controller.core.state import ControllerState, RunPrompts
from starling.controller.shell.loggers.fanout import PastSteps
from starling.controller.shell.outputs.append_file import AppendFile
from starling.controller.shell.outputs.timelines import Timelines
from starling.controller.shell.outputs.trajectory_writer import TrajectoryFiles, TrajectoryFilesError
from starling.controller.shell.recording.recorder import Recorder
from starling.controller.shell.status import MetricsHistory, snapshot

VICTIM = "kept as it is\n"
PUBLISHED = {"kind": "published", "time": 1.0, "version": 1, "publish_s": 0.1, "offer_s": 0.1}
STEP = {"step": 3, "phase": "rl", "loss": 0.1, "reward_mean": 0.5, "staleness_mean": 0.5, "staleness_max": 1}
EVALUATION = {"version": 1, "k": 2, "num_prompts": 2, "reward_mean": 0.5, "score/math": 0.1}
HOSTILE: list[Any] = [
    None, True, "x", "\ud800", [], [[]], {}, {"a": {}}, -1, 1 << 70, 10**4000, 1e308, float("nan"), float("inf"),
]  # fmt: skip


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text(VICTIM)
    return path


def append(path: Path) -> None:
    lines = AppendFile(path)
    lines.write("a line")
    lines.close()


def record(path: Path) -> None:
    recorder = Recorder(path, run="r", incarnation=3, plan=PLAN, past=[], held_out=HELD_OUT, cap_bytes=1 << 30)
    assert "cannot open" in recorder.stopped
    recorder.close()


def trace(path: Path) -> None:
    timelines = Timelines(path.parents[1])
    timelines.note(PUBLISHED)
    timelines.write()


def store(path: Path) -> None:
    with pytest.raises(TrajectoryFilesError, match=r"cannot be (read|written)"):
        TrajectoryFiles(path.parents[1], "r").write(1, [])


WRITERS: dict[str, Callable[[Path], None]] = {
    "metrics.jsonl": append,
    "events-3.rec": record,
    "weightsync/version-000001.json": trace,
    "trajectories/.step-000001.msgpack.partial": store,
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("is_fifo", [False, True])
def test_no_writer_follows_a_link_or_blocks_at_a_fifo(name: str, is_fifo: bool, victim: Path, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if is_fifo:
        os.mkfifo(path)
    else:
        path.symlink_to(victim)
    WRITERS[name](path)
    assert victim.read_text() == VICTIM


@pytest.mark.parametrize("is_fifo", [False, True])
def test_metrics_that_are_no_file_are_refused(is_fifo: bool, victim: Path, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    if is_fifo:
        os.mkfifo(path)
    else:
        path.symlink_to(victim)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl cannot be read: it is (a symbolic|not a reg)"):
        MetricsHistory(0.0).read(path)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl cannot be read"):
        list(PastSteps(path, 10, newest=1).after(0))


def test_hard_link_is_a_file_like_any_other(victim: Path, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").hardlink_to(victim)
    os.close(open_own(tmp_path / "metrics.jsonl"))


def shown(history: MetricsHistory) -> None:
    """Send the history as a snapshot, and show it on both screens."""
    state = ControllerState(PLAN, RunPrompts(None, None, ()), 1)
    seen = msgspec.structs.replace(snapshot(state, history, 1.0, 0), phase="rl", version=3)
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(seen), type=RunSnapshot)
    recipe = Recipe.model_validate(
        {"data": {"source": "p"}, "model": {"path": "m"}, "reward": {"scorers": [{"name": "math"}]}}
    )
    PlainScreen(recipe).show(received)
    with Console(width=100).capture():
        Console(width=100).print(LiveScreen(recipe, Path("runs"))._draw(received))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "line"), [("step", STEP), ("evaluation", EVALUATION)])
def test_hostile_lines_are_skipped_or_can_be_shown(kind: str, line: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for field in [*line, "alarms", "tasks", "other", "kind", "sampled_reward_mean", "filtered_share"]:
        for bad in HOSTILE:
            changed = {"time": 1.0, "kind": kind, **line, field: bad}
            path.write_text(json.dumps(changed) + "\n")
            history = MetricsHistory(0.0)
            history.read(path)
            shown(history)
            list(PastSteps(path, path.stat().st_size, newest=9).after(0))


def test_skipped_step_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"kind": "step", **STEP, "reward_mean": "x"}) + "\n")
    assert MetricsHistory(0.0).read(path) == set()


def test_evaluation_with_tasks_reaches_the_screen() -> None:
    """A snapshot with the tasks of an evaluation could be decoded by no reader."""
    history = MetricsHistory(0.0)
    history.note("evaluation", {**EVALUATION, "tasks": {"add": {"num_prompts": 2, "reward_mean": 0.5}}})
    history.note("step", {**STEP, "set/controller.x": True})
    shown(history)
    assert history.evaluations[0]["reward_mean"] == 0.5
