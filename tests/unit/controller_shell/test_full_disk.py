"""Start of a controller and of a command on a full disk: one sentence, and nothing that stays in the way."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from starling.cli.report.summary import report
from starling.cli.run.attempt import Attempt
from starling.common.errors import ConfigError, RestartError
from starling.common.files import write_whole
from starling.common.observe.process import EXIT_RESTART
from starling.controller.core.records import ControllerStarted
from starling.controller.shell.journal.journal import Journal, read_journal

CONFIG = """
[run]
id = "r"
[network]
curve = false
[data]
source = "{folder}/prompts.jsonl"
format = "{{question}}"
[rl]
num_steps = 1
"""


@pytest.fixture
def larger_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KiB, on which an empty journal fits."""
    folder = tmp_path / "larger"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def start(path: Path) -> None:
    journal = Journal(path)
    try:
        journal.append(ControllerStarted(incarnation=1))
        journal.commit()
    finally:
        journal.close()


@pytest.mark.parametrize("free_kib", [4, 8, 16, 24, 32, 48, 64])
def test_journal_that_does_not_fit_is_one_sentence(larger_disk: Path, free_kib: int) -> None:
    (larger_disk / "ballast").write_bytes(bytes((256 - free_kib) << 10))
    path = larger_disk / "journal.sqlite"
    with pytest.raises(RestartError, match=rf"the disk of the journal {path} is full; free some space, and start the"):
        start(path)
    (larger_disk / "ballast").unlink()
    start(path)
    assert len(list(read_journal(path))) == 1


def test_journal_of_a_run_on_a_full_disk_is_one_sentence(larger_disk: Path) -> None:
    path = larger_disk / "journal.sqlite"
    start(path)
    used = sum(file.stat().st_blocks * 512 for file in larger_disk.iterdir())
    (larger_disk / "ballast").write_bytes(bytes((256 << 10) - used))
    with pytest.raises(RestartError, match="is full; free some space, and start the run again"):
        start(path)
    (larger_disk / "ballast").unlink()
    start(path)
    assert len(list(read_journal(path))) == 2


def test_whole_file_on_a_full_disk_names_itself_and_leaves_nothing(disk: Path) -> None:
    path = disk / "controller.json"
    write_whole(path, "old")
    (disk / "ballast").write_bytes(bytes(60 << 10))
    with pytest.raises(OSError, match=rf"No space left on device: '{path}'"):
        write_whole(path, "x" * 5000)
    assert sorted(file.name for file in disk.iterdir()) == ["ballast", "controller.json"]
    assert path.read_text() == "old"


def test_lock_on_a_full_disk_is_one_sentence(disk: Path) -> None:
    (disk / "ballast").write_bytes(bytes(64 << 10))
    with pytest.raises(ConfigError, match=r"lock cannot be written: No space left on device; free some space"):
        Attempt(disk).acquire()
    (disk / "ballast").unlink()
    os.close(Attempt(disk).acquire())


def test_report_on_a_full_disk_is_shown_without_its_picture(disk: Path, tmp_path: Path) -> None:
    (disk / "metrics.jsonl").write_text(
        '{"kind": "step", "step": 1, "reward_mean": 0.5, "staleness_mean": 0.5, "staleness_max": 1}\n'
    )
    (disk / "ballast").write_bytes(bytes(60 << 10))
    with (tmp_path / "out").open("w") as out:
        report(Attempt(disk), 1.0, Console(file=out, width=200))
    assert "not drawn: No space left on device" in (tmp_path / "out").read_text()


def test_controller_that_cannot_write_its_address_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(CONFIG.format(folder=tmp_path))
    (tmp_path / "prompts.jsonl").write_text('{"question": "1", "answer": "2"}\n')
    (tmp_path / ".controller.json.partial").mkdir()
    command = [sys.executable, "-m", "starling.controller.shell.main", "--dir", str(tmp_path)]
    ended = subprocess.run(
        [*command, "--config", str(tmp_path / "config.toml")], capture_output=True, text=True, timeout=120, check=False
    )
    assert f"{tmp_path}/.controller.json.partial cannot be written: Is a directory; free some space" in ended.stderr
    assert "Traceback" not in ended.stderr + ended.stdout
    assert ended.returncode == EXIT_RESTART
