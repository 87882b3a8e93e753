"""Writes the files of `data/trajectories.py`: each whole, each once, whatever dies in between."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from starling.common.errors import StarlingError
from starling.controller.core.groups.stored import StoredGroup
from starling.controller.data.trajectories import FOLDER, INDEX, IndexEntry, encode_file, line_of, read_index


class TrajectoryFilesError(StarlingError):
    """A file of trajectories cannot be written; the run can be taken up again when it can."""


class TrajectoryFiles:
    """The trajectories of one run, in its folder."""

    def __init__(self, folder: Path, run: str) -> None:
        """Go on with what is in `folder`, the run's own; nothing is made before the first file."""
        self._folder, self._run = folder / FOLDER, run
        self._steps: set[int] | None = None
        """Those that the index names; None before it was looked at."""

    def write(self, step: int, groups: Sequence[StoredGroup]) -> None:
        """Have the groups of `step` on disk when this returns. Raises FilesError."""
        try:
            if step not in self._known():
                self._write(step, groups)
        except OSError as error:
            raise TrajectoryFilesError(
                f"the trajectories of step {step} cannot be written to {self._folder}: {error.strerror}; make room, "
                "and take the run up again"
            ) from None

    def _known(self) -> set[int]:
        if self._steps is None:
            self._folder.mkdir(exist_ok=True)
            index = self._folder / INDEX
            index.touch()
            for folder in (self._folder, self._folder.parent):  # lines that are on disk can be found there
                _sync_folder(folder)
            # A line that was cut short is written again, with its file.
            os.truncate(index, index.read_bytes().rfind(b"\n") + 1)
            self._steps = {line.step for line in read_index(self._folder)}
        return self._steps

    def _write(self, step: int, groups: Sequence[StoredGroup]) -> None:
        content = encode_file(self._run, step, groups)
        line = line_of(step, groups, content)
        path = self._folder / line.file
        partial = path.with_name(f".{path.name}.partial")
        _write_through(partial, content, os.O_TRUNC)
        partial.rename(path)
        _sync_folder(self._folder)
        _write_through(self._folder / INDEX, _encoded(line), os.O_APPEND)
        self._known().add(step)


class TrajectoryWriter:
    """Writes files beside the controller's loop: a disk takes its time, and others' heartbeats do not wait."""

    def __init__(self, files: TrajectoryFiles, wake: Callable[[], None]) -> None:
        """`wake`: called, from another thread, when `written` has something to return or to raise."""
        self._files, self._wake = files, wake
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="files")
        self._under_way: deque[tuple[int, Future[None]]] = deque()

    def begin(self, step: int, groups: Sequence[StoredGroup]) -> None:
        """Have the groups of `step` written, after those that came before."""
        future = self._thread.submit(self._files.write, step, groups)
        self._under_way.append((step, future))
        future.add_done_callback(lambda _: self._wake())

    def written(self) -> list[int]:
        """Return the steps that are on disk since the last call. Raises FilesError."""
        steps = []
        while self._under_way and self._under_way[0][1].done():
            step, future = self._under_way.popleft()
            future.result()
            steps.append(step)
        return steps

    def close(self) -> None:
        """Begin nothing more, and wait for what is being written: from now on the folder may be another's."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def _encoded(line: IndexEntry) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def _write_through(path: Path, content: bytes, flag: int) -> None:
    """Write `content`, and return when it is on disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flag, 0o644)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
