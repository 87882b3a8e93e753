"""Writer of the trajectory files of `data/trajectories.py`: each file atomically and once, also across crashes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import structlog

from starling.common.errors import StarlingError
from starling.common.files import open_own, sync_folder, write_whole
from starling.controller.core.records import StoredGroup
from starling.controller.data.trajectories import (
    FOLDER,
    INDEX,
    IndexEntry,
    encode_file,
    encode_line,
    index_entry,
    intact_lines,
    line_of_file,
)

log = structlog.get_logger(__name__)


class TrajectoryFilesError(StarlingError):
    """A trajectory file cannot be written. The run can be resumed when it can."""


class TrajectoryFiles:
    """The trajectory files of one run."""

    def __init__(self, folder: Path, run: str) -> None:
        """Continue the files in the run's `folder`; nothing is created before the first file."""
        self._folder, self._run = folder / FOLDER, run
        self._steps: set[int] | None = None
        """The steps in the index; None before it was read."""

    def recover(self) -> None:
        """Complete the index, if there is one: a power cut may have taken its end. Raises TrajectoryFilesError."""
        try:
            if (self._folder / INDEX).exists():
                self._written_steps()
        except OSError as error:
            raise TrajectoryFilesError(f"{self._folder} cannot be read: {error.strerror}; restore it") from None

    def write(self, step: int, groups: Sequence[StoredGroup]) -> None:
        """Write the groups of `step`, which are durable when this returns. Raises TrajectoryFilesError."""
        try:
            if step not in self._written_steps():
                self._write(step, groups)
        except OSError as error:
            raise TrajectoryFilesError(
                f"the trajectories of step {step} cannot be written to {self._folder}: {error.strerror}; free some "
                "space and resume the run"
            ) from None

    def _written_steps(self) -> set[int]:
        if self._steps is None:
            self._folder.mkdir(exist_ok=True)
            index = self._folder / INDEX
            index.touch()
            for folder in (self._folder, self._folder.parent):  # so that the index survives a crash
                sync_folder(folder)
            self._steps = {line.step for line in self._recover_index()}
        return self._steps

    def _recover_index(self) -> list[IndexEntry]:
        """Return the lines of the index, after writing it again if it has lost lines: every file is complete."""
        lines = {line.file: line for line in intact_lines(self._folder)}
        num_lost = 0
        for path in self._folder.glob("step-*.msgpack"):
            line = line_of_file(path, self._run) if path.name not in lines else None
            if line is not None:
                lines[path.name] = line
                num_lost += 1
        found = sorted(lines.values(), key=lambda line: line.step)
        content = b"".join(map(encode_line, found))
        if content != (self._folder / INDEX).read_bytes():
            write_whole(self._folder / INDEX, content)
            log.warning("index_recovered", file=str(self._folder / INDEX), lines=num_lost)
        return found

    def _write(self, step: int, groups: Sequence[StoredGroup]) -> None:
        content = encode_file(self._run, step, groups)
        line = index_entry(step, groups, content)
        path = self._folder / line.file
        partial = path.with_name(f".{path.name}.partial")
        _write_through(partial, content, os.O_TRUNC)
        partial.rename(path)
        sync_folder(self._folder)
        _write_through(self._folder / INDEX, encode_line(line), os.O_APPEND)
        self._written_steps().add(step)


class TrajectoryWriter:
    """Writes files in a thread, so that a slow disk does not delay the controller's loop."""

    def __init__(self, files: TrajectoryFiles, wake: Callable[[], None]) -> None:
        """`wake` is called in the writer's thread when `written` has something to return or to raise."""
        self._files, self._wake = files, wake
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="files")
        self._in_progress: deque[tuple[int, Future[None]]] = deque()

    def begin(self, step: int, groups: Sequence[StoredGroup]) -> None:
        """Queue the groups of `step` for writing."""
        future = self._thread.submit(self._files.write, step, groups)
        self._in_progress.append((step, future))
        future.add_done_callback(lambda _: self._wake())

    def written(self) -> list[int]:
        """Return the steps that were written since the last call. Raises TrajectoryFilesError."""
        steps = []
        while self._in_progress and self._in_progress[0][1].done():
            step, future = self._in_progress.popleft()
            future.result()
            steps.append(step)
        return steps

    def close(self) -> None:
        """Drop the queue and wait for the file in progress; afterwards another process may use the folder."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def _write_through(path: Path, content: bytes, flag: int) -> None:
    """Write `content` durably."""
    descriptor = open_own(path, os.O_WRONLY | os.O_CREAT | flag)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
