"""Commands on the folder of a run that comes from others: links and FIFOs in place of files, and hostile metrics."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from starling.cli.main import main
from starling.cli.report.summary import report
from starling.cli.run.attempt import Attempt
from starling.common import files
from starling.common.errors import ConfigError
from starling.common.net.keyring import make_keys
from starling.controller.core.records import RunEnded
from starling.controller.shell.journal.journal import Journal

CONFIG = '[run]\nid = "x"\nkind = "rl"\n[network]\ncurve = true\n'
RECIPE = '[data]\nsource = "p.jsonl"\nformat = "{question}"\n[model.scratch]\n[[reward.scorers]]\nname = "math"\n'
VICTIM = "kept as it is\n"
PUBLISHED = {"kind": "published", "time": 1.0, "version": 1, "publish_s": 0.1, "offer_s": 0.1}
ADOPTED = {
    "kind": "adopted",
    "time": 2.0,
    "version": 1,
    "replica": "rollout-0",
    "attested": True,
    "pull_s": 0.5,
    "pause_s": 0.1,
    "size_bytes": 100,
    "sent_bytes": 90,
    "transport": "tcp",
    "lanes": ["a"],
    "split": {"read_s": 0.4, "prepare_s": 0.1},
    "source": "policy-0",
    "expected_s": 0.3,
    "links": {"rail": {"pairs": 1, "bytes": 90, "expected_s": 0.3}},
    "pairs": [
        {
            "source_rank": 0,
            "rank": 1,
            "link": "rail",
            "bytes": 90,
            "expected_s": 0.3,
            "transport": "tcp",
            "sent_bytes": 80,
            "read_s": 0.4,
        }
    ],
}
STEP = {"kind": "step", "step": 3, "reward_mean": 0.5, "staleness_mean": 0.5, "staleness_max": 1}
EVALUATION = {
    "kind": "evaluation",
    "version": 1,
    "k": 2,
    "num_prompts": 2,
    "reward_mean": 0.5,
    "pass_at_k": 0.5,
    "score/math": 0.1,
    "tasks": {"add": {"num_prompts": 2, "reward_mean": 0.5}},
}
ALARM = {"kind": "alarm", "name": "clip", "step": 3, "value": 0.7, "bound": 0.5, "text": "t"}
OTHERS = [
    {**ALARM, "kind": "alarm_over", "step": 4},
    {"kind": "logger", "logger": "wandb", "dropped": 1, "reason": "full"},
    {"kind": "checkpoint", "path": "states/version-3"},
    {"kind": "step", "step": 4, "num_prompts": 2, "num_failed": 1, "num_tokens": 9, "reward_mean": 0.5},
]
LINES: list[dict[str, Any]] = [PUBLISHED, ADOPTED, STEP, EVALUATION, ALARM, *OTHERS]
HOSTILE: list[Any] = [
    None, True, "x", "\ud800", "\x1b[2J", [], [[]], {}, {"a": {}}, -1, 1 << 70, 10**4000, 1e308, -1e308,
    float("nan"), float("inf"),
]  # fmt: skip


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an attempt of a run whose controller does not answer."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run" / "attempt-1"
    (folder / "logs").mkdir(parents=True)
    make_keys(folder / "keys", ["operator-0"])
    (folder / "config.toml").write_text(CONFIG)
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "controller.json").write_text('{"address": "tcp://127.0.0.1:1"}')
    (folder / "events-1.rec").write_bytes(b"starling-recording 1\n")
    (tmp_path / "victim").write_text(VICTIM)
    return folder


def put_link(path: Path) -> None:
    path.symlink_to(path.parents[2 if path.parent.name != "logs" else 3] / "victim")


def put_dangling(path: Path) -> None:
    path.symlink_to(path.parents[2 if path.parent.name != "logs" else 3] / "nowhere")


COMMANDS = {
    "config.toml": [["status", "run"], ["why", "run"], ["run", "--resume", "run"], ["record", "run"]],
    "controller.json": [["status", "run"], ["stop", "run"], ["run", "--resume", "run"]],
    "metrics.jsonl": [["sync-report", "run"], ["run", "--resume", "run"]],
    "samples.jsonl": [["run", "--resume", "run"]],
    "samples.old.jsonl": [["run", "--resume", "run"]],
    "events-1.rec": [["record", "run"], ["run", "--resume", "run"]],
    "journal.sqlite": [["run", "--resume", "run"]],
    "journal.sqlite-wal": [["run", "--resume", "run"]],
    "journal.sqlite-shm": [["run", "--resume", "run"]],
    "lock": [["run", "--resume", "run"]],
    "logs/controller.log": [["record", "run"], ["run", "--resume", "run"]],
}


@pytest.mark.parametrize(
    "put",
    [put_link, pytest.param(put_dangling, marks=pytest.mark.campaign), os.mkfifo],
    ids=["link", "dangling", "fifo"],
)
@pytest.mark.parametrize(
    ("name", "argv"), [(name, argv) for name, several in COMMANDS.items() for argv in several], ids=str
)
def test_file_of_a_run_that_is_a_link_or_a_fifo_is_refused(
    name: str, argv: list[str], put: Callable[[Path], None], attempt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (attempt / name).unlink(missing_ok=True)
    put(attempt / name)
    assert main(argv) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith("starling: "), error
    assert error.count("\n") == 1, error
    assert Path(name).name in error or "events-<n>.rec" in error
    assert not (attempt.parents[1] / "nowhere").exists()
    assert (attempt.parents[1] / "victim").read_text() == VICTIM
    assert not (attempt / "crash-report.zip").exists()


def test_lock_that_is_a_fifo_does_not_block_status(attempt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(attempt / "lock")
    assert main(["status", "run", "--timeout", "0.2"]) == 1
    assert "no answer for 0.2 s" in capsys.readouterr().err


def changed() -> list[tuple[dict[str, Any], ...]]:
    """Return the lines of a run with one field replaced, or missing."""
    found: list[tuple[dict[str, Any], ...]] = []
    for number, line in enumerate(LINES):
        rest = (LINES[:number], LINES[number + 1 :])
        for field in line:
            less = {name: value for name, value in line.items() if name != field}
            found += [(*rest[0], one, *rest[1]) for one in (less, *({**line, field: bad} for bad in HOSTILE))]
    for field, bad in itertools.product(("read_s", "prepare_s"), HOSTILE):
        found.append((PUBLISHED, {**ADOPTED, "split": {field: bad}}, STEP))
    for field, bad in itertools.product(("num_prompts", "reward_mean"), HOSTILE):
        found.append((STEP, {**EVALUATION, "tasks": {"add": {"num_prompts": 1, field: bad}}}))
    return found


EACH_STRIDE = pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.campaign)])
"""Every field with some values, and every value in some fields; all pairs in the campaign."""


def write_lines(attempt: Path, lines: tuple[dict[str, Any], ...]) -> None:
    (attempt / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def reported(attempt: Path) -> str:
    """Print the report. Returns the sentence by which it was refused, or that of a refused one."""
    with (attempt / "out").open("w") as out:
        try:
            report(Attempt(attempt), 1.0, Console(file=out, width=200))
        except ConfigError as error:
            return str(error)
    return "metrics.jsonl has a damaged line of a step"


@EACH_STRIDE
def test_hostile_metrics_end_a_report_with_a_sentence(
    stride: int, attempt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("starling.cli.report.summary.draw_curve", lambda rewards, held_out, path: None)  # 0.2 s each
    for lines in changed()[::stride]:
        write_lines(attempt, lines)
        assert "metrics.jsonl has a damaged line of a step" in reported(attempt)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e308, 1 << 70])
def test_hostile_rewards_can_be_drawn_or_are_refused(bad: float, attempt: Path) -> None:
    write_lines(attempt, (STEP, {**STEP, "reward_mean": bad}, {**STEP, "step": bad}))
    assert "metrics.jsonl has a damaged line of a step" in reported(attempt)


@pytest.mark.sample(1)
@EACH_STRIDE
@pytest.mark.parametrize("flags", [[], ["--json"], ["--trace", "1"]])
def test_hostile_metrics_end_sync_report_with_a_sentence(
    flags: list[str], stride: int, attempt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for lines in changed()[::stride]:
        write_lines(attempt, lines)
        if main(["sync-report", "run", *flags]):
            error = capsys.readouterr().err
            assert error.startswith("starling: "), lines
            assert error.count("\n") == 1, lines


def test_drawn_curve_replaces_a_link(attempt: Path) -> None:
    write_lines(attempt, (STEP,))
    put_link(attempt / "reward.png")
    with (attempt / "out").open("w") as out:
        report(Attempt(attempt), 1.0, Console(file=out))
    assert not (attempt / "reward.png").is_symlink()
    assert (attempt.parents[1] / "victim").read_text() == VICTIM


@pytest.mark.parametrize("content", [b'{"kind": "published", "x": "' + b"x" * 300, bytes(300)], ids=["text", "zeros"])
def test_line_without_end_is_refused(
    content: bytes, attempt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 256)
    (attempt / "metrics.jsonl").write_bytes(content)
    assert main(["sync-report", "run"]) == 2
    assert "metrics.jsonl has a line of more than 0 MiB; remove the line" in capsys.readouterr().err


def test_sparse_metrics_of_a_terabyte_take_no_memory(attempt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (attempt / "metrics.jsonl").touch()
    os.truncate(attempt / "metrics.jsonl", 1 << 40)
    assert main(["sync-report", "run"]) == 2
    assert "metrics.jsonl has a line of more than 16 MiB; remove the line" in capsys.readouterr().err


def test_deep_metrics_are_left_out(attempt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep = "[" * 200_000
    (attempt / "metrics.jsonl").write_text(f'{deep}\n{{"kind": "published", "a": {deep}}}\n')
    assert main(["sync-report", "run"]) == 2
    assert "no replica has adopted a version" in capsys.readouterr().err


@pytest.mark.parametrize("step", [*HOSTILE, 7])
def test_hostile_steps_are_not_counted(step: object, attempt: Path) -> None:
    write_lines(attempt, ({"kind": "step", "step": step}, {"kind": "step", "step": 3}))
    assert Attempt(attempt).num_steps() == (step if type(step) is int and step > 3 else 3)


def test_journal_reached_through_a_link_is_not_complete(attempt: Path) -> None:
    elsewhere = attempt.parents[1] / "journal.sqlite"
    journal = Journal(elsewhere)
    journal.append(RunEnded(ok=True, reason="the run is complete"))
    journal.commit()
    journal.close()
    (attempt / "journal.sqlite").symlink_to(elsewhere)
    assert not Attempt(attempt).is_complete()
    with pytest.raises(ConfigError, match=r"journal\.sqlite is a symbolic link, which is not followed; move it away"):
        Journal(attempt / "journal.sqlite")
