"""Loaded by each Python process of a run through `PYTHONPATH`: archives what the controller deletes from its journal.

The triggers are temporary: they belong to the controller's connection, and nothing of them is in the journal's file,
which would be refused. Each deleted row is in the archive before its transaction ends, so a kill loses none. A row
whose deletion is rolled back is in both files.
"""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path
from typing import Any

ARCHIVE = os.environ.get("ARCHIVE_OF_JOURNAL", "")
"""Path of the archive; empty in a process that keeps none."""
JOURNAL = os.environ.get("ARCHIVED_JOURNAL", "")
TRIGGERS = (
    "CREATE TEMP TRIGGER archive_record BEFORE DELETE ON main.records BEGIN"
    " SELECT archive('records', old.seq, old.body); END",
    "CREATE TEMP TRIGGER archive_contents BEFORE DELETE ON main.contents BEGIN"
    " SELECT archive('contents', old.id, old.body); END",
    "CREATE TEMP TRIGGER pause_compaction BEFORE INSERT ON main.marks WHEN new.name = 'compacted' BEGIN"
    " SELECT pause(); END",
)
PAUSE_S = 10.0


class ArchivingConnection(sqlite3.Connection):
    """A connection of the journal's writer."""

    _archive: sqlite3.Connection | None = None

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        """Execute a statement; the first transaction after the tables exist adds the triggers before it."""
        if self._archive is None and sql == "BEGIN IMMEDIATE" and self._has_tables():
            self._add_triggers()
        return super().execute(sql, *parameters)

    def _has_tables(self) -> bool:
        return super().execute("SELECT 1 FROM sqlite_master WHERE name = 'marks'").fetchone() is not None

    def _add_triggers(self) -> None:
        archive = sqlite3.connect(ARCHIVE, isolation_level=None, check_same_thread=False, timeout=60.0)
        archive.execute("PRAGMA synchronous = OFF")  # processes are killed here, the machine is not
        for table in ("records", "contents"):
            archive.execute(f"CREATE TABLE IF NOT EXISTS {table} (id INTEGER PRIMARY KEY, body BLOB NOT NULL)")

        def keep(table: str, row: int, body: bytes) -> None:
            archive.execute(f"INSERT OR REPLACE INTO {table} VALUES (?, ?)", (row, body))

        self.create_function("archive", 3, keep)
        self.create_function("pause", 0, pause)
        for trigger in TRIGGERS:
            super().execute(trigger)
        self._archive = archive


def pause() -> None:
    """Wait in the middle of a compaction, where that is asked of this process: for `PAUSE_S` at most."""
    request, deadline = Path(f"{ARCHIVE}.pause"), time.monotonic() + PAUSE_S
    while request.exists() and request.read_text() == str(os.getpid()) and time.monotonic() < deadline:
        time.sleep(0.01)


def connect(database: Any, *arguments: Any, **options: Any) -> sqlite3.Connection:
    """Return a connection, which archives if it is of the journal's writer; readers open it by a URI."""
    if not options.get("uri") and os.path.abspath(database) == JOURNAL:
        options["factory"] = ArchivingConnection
    return _connect(database, *arguments, **options)


_connect = sqlite3.connect
if ARCHIVE:
    sqlite3.connect = connect  # type: ignore[assignment]
