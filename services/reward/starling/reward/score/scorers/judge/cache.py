"""Answers of a judge by a digest of all that they depend on: in memory, and optionally in a file of SQLite."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
import sys
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final

_BUSY_S: Final = 2.0
_PAGE_BYTES: Final = 4096


def digest(*parts: Any) -> str:
    """Return the key of JSON values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class AnswerCache:
    """Thread-safe. A file that cannot be read or written is as an empty one: the judge is asked again.

    Args:
        num: answers in memory, of which the ones that were used least recently are dropped.
        path: file that several workers and runs share; None for none.
        file_mb: size at which nothing more is written into the file.

    Raises:
        OSError: the file cannot be created or is not a database.
    """

    def __init__(self, num: int, path: Path | None, file_mb: int) -> None:
        self._num, self._lock, self._path = num, threading.Lock(), path
        self._is_reported = False
        self._memory: OrderedDict[str, str] = OrderedDict()
        self._file: sqlite3.Connection | None = None
        if path is not None:
            try:
                self._file = sqlite3.connect(path, timeout=_BUSY_S, check_same_thread=False, isolation_level=None)
                self._file.execute(f"PRAGMA max_page_count = {max(16, (file_mb << 20) // _PAGE_BYTES)}")
                self._file.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, text TEXT NOT NULL)")
            except sqlite3.Error as error:
                raise OSError(str(error)) from None

    def get(self, key: str) -> str | None:
        """Return the answer of a key, or None."""
        with self._lock:
            if key in self._memory:
                self._memory.move_to_end(key)
                return self._memory[key]
            text = self._read(key)
            if text is not None:
                self._remember(key, text)
            return text

    def put(self, key: str, text: str) -> None:
        """Store an answer."""
        with self._lock:
            self._remember(key, text)
            if self._file is not None:
                try:
                    self._file.execute("INSERT OR IGNORE INTO answers VALUES (?, ?)", (key, text))
                except sqlite3.Error as error:
                    self._report(error)

    def _report(self, error: sqlite3.Error) -> None:
        """Print once that the file cannot be written; a file that has reached its size is meant to be full."""
        if self._is_reported or self._has_its_size():
            return
        self._is_reported = True
        print(
            f"the judge's answers are not kept in {self._path}: {error}; free some space, or give another cache_file",
            file=sys.stderr,
        )

    def _has_its_size(self) -> bool:
        """Return whether the file has as many pages as it may have."""
        assert self._file is not None, "it cannot be written"
        with contextlib.suppress(sqlite3.Error):
            num, most = (
                self._file.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "max_page_count")
            )
            return bool(num >= most)
        return False

    def _read(self, key: str) -> str | None:
        if self._file is None:
            return None
        with contextlib.suppress(sqlite3.Error):
            row = self._file.execute("SELECT text FROM answers WHERE key = ?", (key,)).fetchone()
            return row[0] if row is not None and isinstance(row[0], str) else None
        return None

    def _remember(self, key: str, text: str) -> None:
        self._memory[key] = text
        self._memory.move_to_end(key)
        while len(self._memory) > self._num:
            self._memory.popitem(last=False)
