"""Append-only text file whose lines wait in memory while the disk is full, without blocking the controller."""

from __future__ import annotations

import errno
import os
from collections import deque
from pathlib import Path
from typing import Final

import structlog

from starling.common.files import complete_size, open_own

log = structlog.get_logger(__name__)

MAX_WAITING: Final = 10_000
"""Lines that may wait for space; beyond this the oldest are dropped, because they are only measurements."""


def waiting_text(path: Path, error: OSError) -> str:
    """Return in one sentence that lines of a file wait in memory, and what makes them go on."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return full_disk_text(path.parent)
    if error.errno == errno.EROFS:
        return f"the volume of {path.parent} is read-only, and what cannot be written waits; make it writable"
    return f"{path} cannot be written: {error.strerror}; its lines wait in memory; see to its disk"


def full_disk_text(folder: Path) -> str:
    """Return in one sentence that the disk of a run is full, whichever file it is that waits."""
    return f"the disk of {folder} is full, and what cannot be written waits; free some space"


class AppendFile:
    """A file that holds whole lines only, also after writes to a full disk and after a power cut."""

    def __init__(self, path: Path) -> None:
        """Append to `path`."""
        self._path = path
        self._file = -1
        self._waiting: deque[bytes] = deque(maxlen=MAX_WAITING)
        self.problem = ""
        """Why lines wait, in one sentence; empty when none does."""
        self._has_dropped = False

    def write(self, line: str) -> None:
        """Append a line, now or when there is space."""
        self._has_dropped = self._has_dropped or len(self._waiting) == MAX_WAITING
        self._waiting.append(line.encode() + b"\n")
        self.flush()

    def flush(self) -> None:
        """Write the waiting lines."""
        try:
            if self._file < 0 and self._waiting:
                self._open()
            while self._waiting:
                end = os.fstat(self._file).st_size
                if os.write(self._file, self._waiting[0]) < len(self._waiting[0]):
                    os.ftruncate(self._file, end)  # a partial line is removed
                    raise OSError(errno.ENOSPC, "No space left on device")
                self._waiting.popleft()
        except OSError as error:
            if not self.problem:
                log.warning("lines_wait", file=str(self._path), reason=error.strerror)
            self.problem = waiting_text(self._path, error)
            return
        self.problem = ""

    def sync(self) -> int | None:
        """Make all lines durable. Returns the size of the file; None when lines wait for space, or were dropped."""
        self.flush()
        if self._waiting or self._has_dropped:
            return None
        try:
            if self._file < 0:
                return self._path.stat().st_size if self._path.exists() else 0
            os.fsync(self._file)
            return os.fstat(self._file).st_size
        except OSError as error:
            log.warning("lines_wait", file=str(self._path), reason=error.strerror)
            return None

    def close(self) -> None:
        """Write the waiting lines as far as possible, and close the file."""
        self.flush()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self) -> None:
        """Open the file, without the incomplete line that a crash left at its end: the next line would continue it."""
        file = open_own(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            size, complete = os.fstat(file).st_size, complete_size(file)
            if complete < size:
                os.ftruncate(file, complete)
                log.warning("tail_removed", file=str(self._path), size_bytes=size - complete)
        except OSError:
            os.close(file)
            raise
        self._file = file
