"""Checks of one kind of file: it is cut at many places, and read each time as a restart reads it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog
from cut_files import damaged, positions
from file_kinds import FileKind

from starling.common.errors import StarlingError

MEMORY = Path("/dev/shm")
NUM_PARTS = 16
"""Parts of a campaign that cuts a large file at every byte."""


def check(kind: FileKind, *, every: bool, part: int = 0, num_parts: int = 1) -> None:
    """Cut the file of `kind` and read it, at many places, or everywhere; of those places take one part."""
    with memory_folder() as base, structlog.testing.capture_logs():
        written, folder = base / "written", base / "cut"
        written.mkdir()
        kind.write(written)
        (written / kind.file).touch()
        content = (written / kind.file).read_bytes()
        shutil.copytree(written, folder)
        whole = kind.read(folder)
        (written / kind.file).unlink()  # it need not be copied
        chosen = positions(len(content), kind.num, kind.name, every=every)[part::num_parts]
        _check_at(kind, chosen, content, written, folder, whole, every=every)


def _check_at(
    kind: FileKind, chosen: Iterable[int], content: bytes, written: Path, folder: Path, whole: Any, *, every: bool
) -> None:
    for position in chosen:
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


@contextmanager
def memory_folder() -> Iterator[Path]:
    """Yield a folder in memory, where there is one: a sync of a disk would take longer than the test of a cut."""
    where = MEMORY if os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="power-cuts-", dir=where) as folder:
        yield Path(folder)
