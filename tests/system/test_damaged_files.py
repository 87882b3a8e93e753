"""A power cut in the middle of a run: whatever it leaves of a file, the run resumes, or one sentence says why not."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from cut_files import TAIL
from system_runs import (
    END_S,
    attempt,
    make_workdir,
    metrics,
    num_steps,
    run,
    run_concurrently,
    sentence,
    starling_command,
    write_prompts,
)

from starling.cli.run.attempt import read_metrics

pytestmark = pytest.mark.system

CHANGES = {"rl": {"num_steps": 8}, "controller": {"save_every": 2, "save_rest_s": 0.0}}
LAST_STEP, NUM_PROMPTS = 11, 32
"""3 supervised steps and 8 of 4 prompts."""
STATES = "states/version-*"


@dataclass(frozen=True)
class Damage:
    """What a power cut does to one file of a run."""

    file: str
    """A pattern below the attempt's folder; of several files the last one by name."""
    change: Callable[[bytes], bytes]
    problem: str = ""
    """Part of the sentence, if the run cannot be resumed."""
    is_older: bool = False
    """What is left is an older journal: the run resumes from there, unless the policy has saved a later state."""


def cut(share: float) -> Callable[[bytes], bytes]:
    """Return what keeps this share of a file, from its beginning."""
    return lambda content: content[: int(len(content) * share)]


def zeros(share: float) -> Callable[[bytes], bytes]:
    """Return what keeps this share of a file, and fills the rest with zeros."""
    return lambda content: cut(share)(content).ljust(len(content), b"\0")


def torn_line(content: bytes) -> bytes:
    """Tear the last line and leave zeros behind it, with a line that was written afterwards."""
    return content[:-20] + bytes(TAIL) + b'{"kind": "step", "st\n'


RESUMED = {
    "state": Damage(f"{STATES}/state.json", cut(0.7)),
    "journal_log": Damage("journal.sqlite-wal", cut(0.7), is_older=True),
}
MORE = {
    "metrics": Damage("metrics.jsonl", torn_line),
    "metrics_lost": Damage("metrics.jsonl", cut(0.0)),
    "samples": Damage("samples.jsonl", zeros(0.6)),
    "tensors": Damage(f"{STATES}/parts/*.distcp", zeros(0.5)),
    "recording": Damage("events-1.rec", cut(0.4)),
    "journal_lock": Damage("journal.sqlite.lock", zeros(0.0)),
    "log_index": Damage("journal.sqlite-shm", zeros(0.2)),
    "addresses": Damage("controller.json", cut(0.5)),
    "journal_empty": Damage(
        "journal.sqlite", cut(0.0), "is empty or missing, but metrics.jsonl in its folder has step"
    ),
    "recipe": Damage("recipe.toml", cut(0.6), "recipe.toml is cut off"),
    "configuration": Damage("config.toml", cut(0.6), "config.toml is cut off"),
    "key": Damage("keys/rollout-0.json", cut(0.5), "rollout-0.json is not a key file"),
    "keys": Damage("keys/allowed.json", zeros(0.5), "allowed.json is not a key file"),
}


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose machine lost its power in the middle of reinforcement learning, after it had saved states."""
    folder = make_workdir(tmp_path_factory.mktemp("interrupted") / "run", **CHANGES)
    with run(folder) as command:
        command.wait_until(lambda: len(metrics(folder, "state")) >= 3, "three saved states")
        command.kill()
    assert num_steps(folder) < LAST_STEP
    return folder


def damaged(source: Path, folder: Path, damage: Damage) -> None:
    """Copy a run, and damage one of its files."""
    shutil.copytree(source, folder, symlinks=True)
    file = sorted(attempt(folder).glob(damage.file))[-1]
    file.write_bytes(damage.change(file.read_bytes()))


def resumes(source: Path, folder: Path, damage: Damage) -> None:
    """See that a damaged run is resumed to its end, or that one sentence says why not."""
    damaged(source, folder, damage)
    with starling_command(folder, "run", "--resume", "runs/tiny", name="resume") as command:
        code = command.wait()
    if damage.is_older:
        assert code == 0 or "the policy offers version" in sentence(command), command.transcript()
        return
    if damage.problem:
        assert code == 1 or code == 2, command.transcript()
        assert damage.problem in sentence(command), command.transcript()
        return
    assert code == 0, command.transcript()
    lines = read_metrics(attempt(folder) / "metrics.jsonl")
    steps = sorted(line["step"] for line in lines if line["kind"] == "step")
    prompts = [prompt for line in lines if line["kind"] == "trained" for prompt in line["prompts"]]
    assert steps == [*range(1, LAST_STEP + 1)], "every step has its line, once"
    assert len(prompts) == len(set(prompts)) == NUM_PROMPTS, "a prompt was trained twice, or not at all"


def resume_all(kinds: dict[str, Damage], source: Path, folder: Path) -> None:
    """Resume a copy of the run with each kind of damage."""
    run_concurrently(*(partial(resumes, source, folder / name, one) for name, one in kinds.items()), max_workers=2)


def test_damaged_run_is_resumed_or_refused(interrupted: Path, tmp_path: Path) -> None:
    run_concurrently(
        *(partial(resumes, interrupted, tmp_path / name, one) for name, one in RESUMED.items()), max_workers=2
    )


@pytest.mark.campaign
def test_run_with_any_damaged_file_is_resumed_or_refused(interrupted: Path, tmp_path: Path) -> None:
    run_concurrently(
        *(partial(resumes, interrupted, tmp_path / name, one) for name, one in MORE.items()), max_workers=2
    )


def test_run_without_its_journal_is_refused(interrupted: Path, tmp_path: Path) -> None:
    """It does not begin anew, and leaves the recording as it is."""
    folder = tmp_path / "lost"
    shutil.copytree(interrupted, folder, symlinks=True)
    for path in (*attempt(folder).glob("journal.sqlite*"), attempt(folder) / "metrics.jsonl"):
        path.unlink()
    before = (attempt(folder) / "events-1.rec").read_bytes()
    with starling_command(folder, "run", "--resume", "runs/tiny", name="resume") as command:
        assert command.wait() == 1, command.transcript()
    assert "journal.sqlite is empty or missing, but its folder has events-*.rec of a run" in sentence(command)
    assert (attempt(folder) / "events-1.rec").read_bytes() == before


def test_run_whose_journal_has_a_trigger_is_not_resumed(interrupted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "trigger"
    shutil.copytree(interrupted, folder, symlinks=True)
    with closing(sqlite3.connect(attempt(folder) / "journal.sqlite")) as db:
        db.execute("CREATE TRIGGER t AFTER INSERT ON records BEGIN DELETE FROM records; END")
    with starling_command(folder, "run", "--resume", "runs/tiny", name="refused") as command:
        assert command.wait() == 2, command.transcript()
    assert "journal.sqlite has the trigger 't', which no journal has" in sentence(command)


def test_run_with_changed_data_is_resumed_only_deliberately(interrupted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(interrupted, folder, symlinks=True)
    words = [json.loads(line)["question"] for line in (folder / "prompts.jsonl").read_text().splitlines()]
    write_prompts(folder, [word[::-1] for word in words])
    with starling_command(folder, "run", "--resume", "runs/tiny", name="refused") as command:
        assert command.wait() == 1, command.transcript()
    assert "the data of this run has changed: its rows, or their order, differ" in sentence(command)
    with starling_command(folder, "run", "--resume", "runs/tiny", "--accept-changed-data", name="accepted") as command:
        assert command.wait() == 0, command.transcript()
    assert "data_changed" in (attempt(folder) / "logs" / "controller.log").read_text()
    assert num_steps(folder) == LAST_STEP


def test_second_controller_in_a_folder_leaves_one(tmp_path: Path) -> None:
    """The lock is gone, as on a file system that does not keep it: the journal's owner decides."""
    folder = make_workdir(tmp_path / "run", rl={"num_steps": 100_000})
    with run(folder) as command:
        command.wait_until(lambda: num_steps(folder) >= 4, "a step of reinforcement learning")
        (attempt(folder) / "journal.sqlite.lock").unlink()
        second = second_controller(folder)
        try:
            deadline = time.monotonic() + END_S
            while second.poll() is None and command.process.poll() is None:
                assert time.monotonic() < deadline, command.transcript()
                time.sleep(0.05)
            if second.poll() is None:  # the first one had written nothing since the second one read the journal
                assert command.wait() == 1, command.transcript()
                assert "another controller writes the journal" in sentence(command)
                return
        finally:
            second.kill()
            second.wait(END_S)
        assert second.returncode == 1
        last = (folder / "second.log").read_text().splitlines()[-1]
        assert last.startswith("starling controller: another controller writes the journal"), last
        num = num_steps(folder)
        command.wait_until(lambda: num_steps(folder) > num + 2, "further steps of the first controller")
        command.interrupt()
        assert command.wait() == 0, command.transcript()


def second_controller(folder: Path) -> subprocess.Popen[bytes]:
    """Start a controller of the same run."""
    arguments = ["--config", str(attempt(folder) / "config.toml"), "--dir", str(attempt(folder))]
    with (folder / "second.log").open("wb") as log:
        program = [sys.executable, "-m", "starling.controller.shell.main", *arguments]
        return subprocess.Popen(program, cwd=folder, stdout=log, stderr=log)
