"""Append-only files on a disk that fills up: lines wait and keep their order, and no error is raised."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from starling.controller.shell.outputs.append_file import AppendFile


def test_append_file_lines_wait_while_the_disk_is_full(disk: Path) -> None:
    (disk / "ballast").write_bytes(bytes(48 << 10))
    lines = AppendFile(disk / "metrics.jsonl")
    expected = [f"{number} {'x' * 100}" for number in range(300)]
    for line in expected:
        lines.write(line)
    written = (disk / "metrics.jsonl").read_text()
    assert written.endswith("\n"), "incomplete lines were written"
    assert len(written.splitlines()) < 300
    assert lines.problem == f"the disk of {disk} is full, and what cannot be written waits; free some space"
    (disk / "ballast").unlink()
    lines.flush()
    assert (disk / "metrics.jsonl").read_text().splitlines() == expected
    assert lines.problem == ""
    lines.close()


def test_append_file_names_a_volume_that_became_read_only(disk: Path) -> None:
    lines = AppendFile(disk / "metrics.jsonl")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    lines.write("one")
    assert "is read-only, and what cannot be written waits; make it writable" in lines.problem
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    lines.flush()
    assert (lines.problem, (disk / "metrics.jsonl").read_text()) == ("", "one\n")
    lines.close()


def test_append_file_appends_to_an_existing_file(tmp_path: Path) -> None:
    for word in ("one", "two"):
        lines = AppendFile(tmp_path / "metrics.jsonl")
        lines.write(word)
        lines.close()
    assert (tmp_path / "metrics.jsonl").read_text() == "one\ntwo\n"


@pytest.mark.parametrize("torn", [b'{"kind": "st', b"\0" * 5000, b"\xff\xfe" * 70_000], ids=["cut", "zeros", "garbage"])
def test_append_file_removes_an_incomplete_last_line(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"one\n" + torn)
    lines = AppendFile(path)
    lines.write("two")
    lines.close()
    assert path.read_bytes() == b"one\ntwo\n"


def test_append_file_without_a_whole_line_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind"')
    lines = AppendFile(path)
    lines.write("one")
    lines.close()
    assert path.read_bytes() == b"one\n"
