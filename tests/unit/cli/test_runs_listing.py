"""`starling runs`: state by locks and journal, last figures from the ends of the files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from run_folders import BEGUN, ENDED, evaluation_line, make_attempt, step_line

from starling.cli.main import main
from starling.cli.run.attempt import Attempt
from starling.cli.runs.files.state import state_of
from starling.controller.core.records import ControllerStarted, MemberLeft, RunStopped

STOPPED = RunStopped(reason="stopped by an operator")
HOLD = """
import sys, time
from pathlib import Path
{take}
print("held", flush=True)
sys.stdin.read()
"""


def listed(capsys: pytest.CaptureFixture[str], folder: Path) -> list[dict[str, Any]]:
    assert main(["runs", str(folder), "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_row_has_the_figures_of_the_newest_attempt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_attempt(tmp_path / "mine", map(step_line, range(1, 3)), records=())
    lines = [*map(step_line, range(1, 101)), evaluation_line(50, 0.25), evaluation_line(100, 0.75)]
    make_attempt(tmp_path / "mine", lines, number=2)
    [row] = listed(capsys, tmp_path)
    assert row == {
        "name": "mine",
        "folder": str(tmp_path / "mine"),
        "num_attempts": 2,
        "state": "ended",
        "reason": "the run is complete",
        "version": 100,
        "reward": pytest.approx(0.098),
        "evaluation": 0.75,
        "started": BEGUN + 1,
        "duration_s": pytest.approx(99.5),
        "recipe": "grpo · small · p.jsonl",
    }
    assert listed(capsys, tmp_path / "mine") == [row]


@pytest.mark.parametrize(
    ("records", "state"),
    [
        ((ENDED, MemberLeft(name="rollout-0")), "ended"),
        ((STOPPED,), "stopped"),
        ((), "crashed"),
        ((STOPPED, ControllerStarted(incarnation=2)), "crashed"),
    ],
)
def test_state_follows_from_the_journal(records: tuple[Any, ...], state: str, tmp_path: Path) -> None:
    folder = make_attempt(tmp_path / "run", [], records=records)
    (folder / "lock").touch()
    assert state_of(Attempt(folder)).name == state


def test_state_without_a_readable_journal_is_crashed(tmp_path: Path) -> None:
    folder = make_attempt(tmp_path / "run", [])
    (folder / "journal.sqlite").write_bytes(b"no database" * 1000)
    assert state_of(Attempt(folder)).name == "crashed"
    (folder / "journal.sqlite").unlink()
    assert state_of(Attempt(folder)).reason == "it has no journal: no controller has begun it"


@pytest.mark.parametrize(
    "take",
    [
        "from starling.cli.run.attempt import Attempt\nlock = Attempt(Path(sys.argv[1])).acquire()",
        "from starling.controller.shell.journal.database import lock_file\n"
        "lock = lock_file(Path(sys.argv[1]) / 'journal.sqlite')",
    ],
    ids=["supervisor", "controller"],
)
def test_run_with_a_live_process_is_running_until_it_is_killed(take: str, tmp_path: Path) -> None:
    folder = make_attempt(tmp_path / "run", map(step_line, range(1, 4)), records=())
    command = [sys.executable, "-c", HOLD.format(take=take), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        assert state_of(Attempt(folder)).name == "running"
        process.kill()
        process.wait(30)
    assert state_of(Attempt(folder)).name == "crashed"


def test_hostile_texts_are_listed_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_attempt(tmp_path / "run", map(step_line, (1,)), records=(RunStopped(reason="\x1b[2J[/x]"),))
    assert main(["runs", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert r"stopped: \x1b" in out


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 5000, b'{"kind": "step"}\n', b"[" * 99_999 + b"\n", b'{"kind": "step']
)
def test_damaged_metrics_leave_the_figures_empty(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_attempt(tmp_path / "run", [])
    (folder / "metrics.jsonl").write_bytes(content)
    [row] = listed(capsys, tmp_path)
    assert (row["state"], row["version"], row["reward"], row["started"]) == ("ended", None, None, None)


def test_link_in_the_place_of_metrics_is_not_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_attempt(tmp_path / "run", [])
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    (tmp_path / "secret").write_text(json.dumps(step_line(7)) + "\n")
    (folder / "metrics.jsonl").symlink_to(tmp_path / "secret")
    assert listed(capsys, tmp_path)[0]["version"] is None
    assert main(["report", str(folder)]) == 2
    assert "metrics.jsonl cannot be read: it is a symbolic link" in capsys.readouterr().err


def test_folder_without_runs_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, words in ((tmp_path, "there is no run in"), (tmp_path / "x", "there is no folder")):
        assert main(["runs", str(folder)]) == 2
        assert words in capsys.readouterr().err
