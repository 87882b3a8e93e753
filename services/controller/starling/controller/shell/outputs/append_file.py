"""Lines that are appended to a file when its disk has room: they wait for it, and hold nobody up."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import Final

import structlog

log = structlog.get_logger(__name__)

MOST_WAITING: Final = 10_000
"""Beyond these the oldest lines that wait for room are dropped: they are measurements, and memory is for the run."""


class AppendFile:
    """A file of lines. What is in it is whole lines, whatever happens to the disk."""

    def __init__(self, path: Path) -> None:
        """Append to `path`."""
        self._path = path
        self._file = -1
        self._waiting: deque[bytes] = deque(maxlen=MOST_WAITING)
        self._is_full = False

    def write(self, line: str) -> None:
        """Append a line, now or when there is room."""
        self._waiting.append(line.encode() + b"\n")
        self.flush()

    def flush(self) -> None:
        """Write what waits."""
        try:
            if self._file < 0 and self._waiting:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            while self._waiting:
                end = os.fstat(self._file).st_size
                if os.write(self._file, self._waiting[0]) < len(self._waiting[0]):
                    os.ftruncate(self._file, end)  # half a line is none
                    raise OSError(28, "No space left on device")
                self._waiting.popleft()
        except OSError as error:
            if not self._is_full:
                log.warning("lines_wait", file=str(self._path), reason=error.strerror)
            self._is_full = True
            return
        self._is_full = False

    def close(self) -> None:
        """Write what can be written, and let the file go."""
        self.flush()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
