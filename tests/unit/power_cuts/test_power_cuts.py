"""Every file that a run writes, cut anywhere: it is read up to the cut, or one sentence says why not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import structlog
from cut_files import damaged, positions
from file_kinds import KINDS, FileKind

from starling.common.errors import StarlingError


def check(kind: FileKind, tmp_path: Path, *, every: bool) -> None:
    """Cut the file of `kind` and read it, at many places, or everywhere."""
    written, folder = tmp_path / "written", tmp_path / "cut"
    written.mkdir()
    kind.write(written)
    (written / kind.file).touch()
    content = (written / kind.file).read_bytes()
    shutil.copytree(written, folder)
    whole = kind.read(folder)
    for position in positions(len(content), kind.num, kind.name, every=every):
        for name, left in damaged(content, position, kind.name, every=every):
            if kind.writes:
                shutil.rmtree(folder)
                shutil.copytree(written, folder)
            (folder / kind.file).write_bytes(left)
            found, problem = read(kind, folder)
            if problem is None:
                assert kind.accepts(whole, found), f"{name}: read as {found}"
                continue
            assert not kind.survives, f"{name}: {problem}"
            assert "\n" not in problem, f"{name}: not one sentence: {problem}"
            assert str(folder) in problem, f"{name}: the sentence names no file: {problem}"


def read(kind: FileKind, folder: Path) -> tuple[Any, str | None]:
    """Return what is read, or the sentence that says why not."""
    try:
        return kind.read(folder), None
    except StarlingError as error:
        return None, str(error)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_cut_file_is_read_or_refused_in_one_sentence(kind: FileKind, tmp_path: Path) -> None:
    with structlog.testing.capture_logs():
        check(kind, tmp_path, every=False)


@pytest.mark.campaign
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_file_cut_at_every_byte_is_read_or_refused(kind: FileKind, tmp_path: Path) -> None:
    with structlog.testing.capture_logs():
        check(kind, tmp_path, every=True)
