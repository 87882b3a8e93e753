"""Commands on damaged folders of runs, on paths that cannot be used, and on values that no message can carry."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from starling.cli.main import main
from starling.cli.recipe.schema import Recipe
from starling.cli.run.attempt import Attempt
from starling.common.errors import ConfigError
from starling.common.net.keyring import make_keys
from starling.controller.core.records import RunEnded
from starling.controller.shell.journal.journal import Journal

CONFIG = '[run]\nid = "x"\nkind = "rl"\n[network]\ncurve = true\n'
RECIPE = '[data]\nsource = "p.jsonl"\nformat = "{question}"\n[model.scratch]\n[[reward.scorers]]\nname = "math"\n'
ADDRESS = {"address": "tcp://127.0.0.1:1", "telemetry": "tcp://127.0.0.1:1"}
ASK = ("--timeout", "0.2")
Damage = Callable[[Path], object]


def write(name: str, content: str | bytes) -> Damage:
    """Return a damage: the file `name` of the attempt has this content."""

    def apply(attempt: Path) -> None:
        path = attempt / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        path.chmod(0o600)

    return apply


def folder_at(name: str) -> Damage:
    """Return a damage: a folder is where the attempt has a file."""

    def apply(attempt: Path) -> None:
        (attempt / name).unlink(missing_ok=True)
        (attempt / name).mkdir(exist_ok=True)

    return apply


def file_at(name: str) -> Damage:
    """Return a damage: a file is where the attempt has a folder."""

    def apply(attempt: Path) -> None:
        for path in (attempt / name).iterdir():
            path.unlink()
        (attempt / name).rmdir()
        (attempt / name).touch()

    return apply


def both(*damages: Damage) -> Damage:
    return lambda attempt: [damage(attempt) for damage in damages]


def key(text: str) -> Damage:
    content = {"name": "operator-0", "public": text, "secret": text, "controller_public": text}
    return write("keys/operator-0.json", json.dumps(content))


DAMAGES: dict[str, tuple[Damage, list[str], tuple[str, ...], int]] = {
    "config that is no text": (
        write("config.toml", b"\xff"),
        ["status", "run", *ASK],
        ("config.toml cannot be read",),
        2,
    ),
    "config without an id": (
        write("config.toml", "[run]\n"),
        ["status", "run", *ASK],
        ("does not have the run's id",),
        2,
    ),
    "config with a number as its id": (
        write("config.toml", CONFIG.replace('"x"', "5")),
        ["status", "run", *ASK],
        ("does not have the run's id",),
        2,
    ),
    "config that is a folder": (
        folder_at("config.toml"),
        ["why", "run", *ASK],
        ("config.toml is not a regular file",),
        2,
    ),
    "address that is a number": (write("controller.json", '{"address": 5}'), ["status", "run"], ("is damaged",), 1),
    "address that is a list": (write("controller.json", "[]"), ["set", "run", "rl.max_tries", "1"], ("is damaged",), 1),
    "address that is no text": (write("controller.json", b"\xff"), ["stop", "run"], ("is damaged",), 1),
    "address without end": (write("controller.json", "[" * 99_999), ["stop", "run"], ("is damaged",), 1),
    "address that is a folder": (
        folder_at("controller.json"),
        ["status", "run"],
        ("controller.json is not a regular file; move it away",),
        2,
    ),
    "key that is none": (key("x"), ["status", "run", *ASK], ("something other than keys", "`starling keys`"), 2),
    "key of other letters": (key("ü" * 40), ["status", "run", *ASK], ("something other than keys",), 2),
    "key that is no text": (write("keys/operator-0.json", b"\xff"), ["why", "run", *ASK], ("is not a key file",), 2),
    "key that is a folder": (
        folder_at("keys/operator-0.json"),
        ["why", "run", *ASK],
        ("it is no regular file", "`starling keys`"),
        2,
    ),
    "keys that are a file": (
        file_at("keys"),
        ["keys", "make", "run/attempt-1/keys", "policy-0"],
        ("keys cannot be written to run/attempt-1/keys: File exists; give another folder",),
        2,
    ),
    "lock that is a folder": (
        folder_at("lock"),
        ["run", "--resume", "run"],
        ("lock is not a regular file; move it away",),
        2,
    ),
    "lock that is a pipe": (
        lambda attempt: os.mkfifo(attempt / "lock"),
        ["run", "--resume", "run"],
        ("lock is not a regular file",),
        2,
    ),
    "logs that are a file": (file_at("logs"), ["run", "--resume", "run"], ("logs is not a folder; move it away",), 2),
    "keys that are a file, at a resume": (
        file_at("keys"),
        ["run", "--resume", "run"],
        ("keys is not a folder; move it away",),
        2,
    ),
    "metrics that are a folder": (
        folder_at("metrics.jsonl"),
        ["sync-report", "run"],
        ("metrics.jsonl cannot be read: it is not a regular file; move the file away",),
        2,
    ),
    "metrics that are no text": (
        write("metrics.jsonl", b'\xff\n{"kind": "\xff"}\n'),
        ["sync-report", "run"],
        ("no replica",),
        2,
    ),
    "metrics without a version": (
        write("metrics.jsonl", '{"kind": "published"}\n'),
        ["sync-report", "run"],
        ("damaged line", "remove the line"),
        2,
    ),
    "metrics with half a character": (
        write("metrics.jsonl", '{"kind": "published", "version": "\\ud800"}\n'),
        ["sync-report", "run"],
        ("damaged line",),
        2,
    ),
    "recording that is a folder": (folder_at("events-1.rec"), ["record", "run"], ("has no recording",), 2),
    "folder with a strange number": (
        lambda attempt: (attempt.parent / "attempt-²").mkdir(),
        ["record", "run"],
        ("has no recording",),
        2,
    ),
    "folder with a strange number, at an export": (
        lambda attempt: (attempt.parent / "attempt-²").mkdir(),
        ["export", "run", "out"],
        ("config.toml", "--model"),
        2,
    ),
}
"""What is wrong with a run's folder, a command on it, parts of its sentence, and its exit code."""
REFUSED: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "keys in /proc": (["keys", "make", "/proc/k", "policy-0"], ("keys cannot be written to /proc/k", "another folder")),
    "keys in a file": (["keys", "make", "recipe.toml", "policy-0"], ("keys cannot be written to recipe.toml",)),
    "keys nowhere": (["keys", "make", "", "policy-0"], ("a path is empty",)),
    "a recipe that is a folder": (["run", "run"], ("starling: the configuration file run is not a regular",)),
    "a report nowhere": (["record", "run", "--out", ""], ("a path is empty",)),
    "a report without a value": (["record", "run", "--out="], ("a path is empty",)),
    "a report at a folder": (["record", "run", "--out", "/"], ("/ is a folder; give a file with --out",)),
    "a number of publications below 0": (["sync-report", "run", "--last", "-5"], ("--last -5", "from 0 on")),
    "a version that was not published": (
        ["sync-report", "run", "--trace", "7"],
        ("version 7 was not published in ", "run/attempt-1; ", "metrics.jsonl have the versions that were"),
    ),
    "a time that is none": (["status", "run", "--timeout", "nan"], ("--timeout nan", "above 0")),
    "a time below 0": (["status", "run", "--timeout", "-1"], ("--timeout -1", "above 0")),
    "a time without end": (["status", "run", "--timeout", "1e300"], ("--timeout 1e+300", "above 0")),
    "a number of 70 bits": (["set", "run", "rl.max_tries", str(1 << 70)], ("rl.max_tries = 118059", "smaller number")),
    "a setting that is no text": (["set", "run", "rl.max_tries", "\udcff"], (r"\udcff' is not UTF-8",)),
    "a run's id that is no text": (
        ["status", "--controller", "tcp://127.0.0.1:1", "--run", "\udcff"],
        (r"--run '\udcff' is not UTF-8",),
    ),
    "a folder as a key": (
        ["status", "--controller", "tcp://127.0.0.1:1", "--run", "x", "--key", "/"],
        ("/ cannot be read (it is no regular file)",),
    ),
}
"""Command lines that are refused, and parts of the sentence."""


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an attempt whose controller does not answer, below the present folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    folder = tmp_path / "run" / "attempt-1"
    (folder / "logs").mkdir(parents=True)
    make_keys(folder / "keys", ["operator-0"])
    (folder / "config.toml").write_text(CONFIG)
    (folder / "recipe.toml").write_text((tmp_path / "recipe.toml").read_text())
    (folder / "controller.json").write_text(json.dumps(ADDRESS))
    return folder


def failed(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run a command; return its exit code and its only sentence."""
    code = main(argv)
    error = capsys.readouterr().err
    assert error.startswith("starling: ")
    assert error.count("\n") == 1, error
    return code, error


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_run_is_one_sentence(damage: str, attempt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    apply, argv, expected, code = DAMAGES[damage]
    apply(attempt)
    found, error = failed(argv, capsys)
    assert all(part in error for part in expected), error
    assert found == code


@pytest.mark.parametrize("mistake", REFUSED)
def test_unusable_argument_is_one_sentence(mistake: str, attempt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (attempt / "events-1.rec").touch()
    argv, expected = REFUSED[mistake]
    code, error = failed(argv, capsys)
    assert all(part in error for part in expected), error
    assert code == 2


def end(attempt: Path) -> None:
    """Let the attempt be over, and complete by its journal."""
    (attempt / "lock").touch()
    journal = Journal(attempt / "journal.sqlite")
    journal.append(RunEnded(ok=True, reason="the run is complete"))
    journal.commit()
    journal.close()


@pytest.mark.parametrize(
    ("kind", "remedy"), [("rl", "`starling export"), ("evaluate", "its results are in that folder")]
)
def test_status_of_a_complete_run_says_so(
    kind: str, remedy: str, attempt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (attempt / "config.toml").write_text(CONFIG.replace('"rl"', f'"{kind}"'))
    (attempt / "lock").touch()
    code, error = failed(["status", "run"], capsys)
    assert "is over; `starling run --resume" in error
    end(attempt)
    code, error = failed(["status", "run"], capsys)
    assert code == 1
    assert f"the run in {attempt} is complete; " in error
    assert remedy in error
    assert "--resume" not in error


def test_resume_of_a_complete_run_has_nothing_to_do(attempt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    end(attempt)
    before = sorted(attempt.rglob("*"))
    assert main(["run", "--resume", "run"]) == 0
    assert f"the run in {attempt} is complete; " in capsys.readouterr().out
    assert sorted(attempt.rglob("*")) == before, "nothing was started"


def create(folder: Path, barrier: Barrier, results: Path, number: int) -> None:
    recipe = Recipe.model_validate(
        {
            "run": {"name": "same", "folder": folder},
            "data": {"source": "p"},
            "model": {"path": "m"},
            "reward": {"scorers": [{"name": "math"}]},
        }
    )
    lines = []
    for _ in range(30):
        barrier.wait(60)
        try:
            lines.append(str(Attempt.create(recipe).folder))
        except ConfigError as error:
            lines.append(f"error {error}")
    (results / str(number)).write_text("\n".join(lines))


def test_two_starts_of_one_name_get_a_folder_each_or_one_sentence(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), tmp_path / "results"
    results.mkdir()
    starts = [context.Process(target=create, args=(tmp_path / "runs", barrier, results, n)) for n in range(4)]
    for process in starts:
        process.start()
    for process in starts:
        process.join(60)
        assert process.exitcode == 0
    lines = [path.read_text().splitlines() for path in results.iterdir()]
    folders = [line for each in lines for line in each if not line.startswith("error")]
    errors = [line for each in lines for line in each if line.startswith("error")]
    assert len(folders) == len(set(folders)), "no folder is made twice"
    assert all(any(not line.startswith("error") for line in at_once) for at_once in zip(*lines, strict=True))
    assert all("has just made" in line and "start this one again" in line for line in errors), errors


def settings_into(descriptor: int) -> tuple[int, str]:
    """Write all settings to `descriptor`, and close it. Returns the exit code and stderr."""
    command = [sys.executable, "-m", "starling.cli.main", "settings", "--toml"]
    process = subprocess.Popen(command, stdout=descriptor, stderr=subprocess.PIPE, text=True)
    os.close(descriptor)
    return process.wait(60), process.communicate()[1]


def test_output_on_a_full_disk_is_one_sentence() -> None:
    code, error = settings_into(os.open("/dev/full", os.O_WRONLY))
    assert error.startswith("starling: the output cannot be used: No space left on device")
    assert error.count("\n") == 1
    assert code == 1


def test_output_that_nothing_reads_ends_in_silence() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    assert settings_into(writing) == (128 + signal.SIGPIPE, "")
