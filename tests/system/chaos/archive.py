"""Archive of a run's journal: triggers in its file keep every record and payload that the controller deletes.

They belong to the file and run within the controller's own transactions, so a compaction and its copy exist together or
not at all. Connections are open only while the controller runs, and otherwise read-only: the last connection to close
would complete the write-ahead log, which a restarted controller has to do.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from starling.controller.core.records import JournalEntry
from starling.controller.shell.journal.journal import _PARTS, _decode

SCHEMA = (
    "CREATE TABLE archived_records (seq INTEGER PRIMARY KEY, body BLOB NOT NULL)",
    "CREATE TABLE archived_contents (id INTEGER PRIMARY KEY, body BLOB NOT NULL)",
    "CREATE TRIGGER archive_record BEFORE DELETE ON records BEGIN"
    " INSERT INTO archived_records VALUES (old.seq, old.body); END",
    "CREATE TRIGGER archive_contents BEFORE DELETE ON contents BEGIN"
    " INSERT INTO archived_contents VALUES (old.id, old.body); END",
    "CREATE TABLE pause (owner INTEGER NOT NULL, rounds INTEGER NOT NULL)",
    "INSERT INTO pause VALUES (0, 0)",
    "CREATE VIEW spin AS WITH RECURSIVE round(number) AS (SELECT 1 UNION ALL SELECT number + 1 FROM round"
    " WHERE number < (SELECT rounds FROM pause)) SELECT count(*) AS num FROM round",
    "CREATE TRIGGER pause_compaction BEFORE INSERT ON marks WHEN new.name = 'compacted'"
    " AND (SELECT value FROM marks WHERE name = 'owner') = (SELECT owner FROM pause)"
    " BEGIN SELECT num FROM spin; END",
)
PAUSE_ROUNDS = 10_000_000
"""Some seconds."""
WRITE_LOCK = 120
"""Byte of the index of the write-ahead log that its writer locks (sqlite.org/walformat.html)."""


class JournalArchive:
    """The journal of a run with all that it ever held, and its compactions, one of which can be made slow."""

    def __init__(self, path: Path) -> None:
        """`path`: of the journal, which need not exist yet."""
        self.path = path
        self._index = path.with_name(f"{path.name}-shm")

    def install(self) -> bool:
        """Add the triggers. Returns False while there is no journal yet."""
        if not self._index.exists():
            return False
        with self._connected("rw") as db:
            db.execute("BEGIN IMMEDIATE")
            known = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if "marks" not in known:
                db.execute("ROLLBACK")
                return False
            assert not db.execute("SELECT * FROM marks WHERE name = 'compacted'").fetchall(), "nothing is deleted yet"
            for statement in SCHEMA:
                db.execute(statement)
            db.execute("COMMIT")
        return True

    def pause_compactions(self) -> None:
        """Make the compactions of the present incarnation of the controller last for seconds."""
        with self._connected("rw") as db:
            db.execute(
                "UPDATE pause SET rounds = ?, owner = (SELECT value FROM marks WHERE name = 'owner')", (PAUSE_ROUNDS,)
            )

    def num_records(self) -> int:
        """Return the number of records since the last compaction, or since the beginning."""
        with self._connected("ro") as db:
            compacted = "SELECT value FROM marks WHERE name = 'compacted'"
            return int(db.execute(f"SELECT max(seq) - coalesce(({compacted}), 0) FROM records").fetchone()[0])

    def is_written_by(self, pid: int) -> bool:
        """Say whether this process is in a transaction that writes the journal."""
        inode = str(os.stat(self._index).st_ino)
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()  # 3: POSIX  ADVISORY  WRITE 4711 00:2d:123 120 120
            if words[1] == "POSIX" and words[-1] == words[-2] == str(WRITE_LOCK) and words[-3].endswith(f":{inode}"):
                return words[-4] == str(pid)
        return False

    def entries(self) -> Iterator[JournalEntry]:
        """Yield all records that ever were in the journal, in order, with their payloads."""
        with self._connected("ro") as db:
            db.execute("BEGIN")
            records = "SELECT seq, body FROM archived_records UNION ALL SELECT seq, body FROM records ORDER BY seq"
            for seq, body in db.execute(records).fetchall():
                where = "WHERE id > ? AND id < ?"  # part 0 is the record again
                contents = f"SELECT id, body FROM archived_contents {where} UNION SELECT id, body FROM contents {where}"
                ids = (seq << _PARTS, (seq + 1) << _PARTS)
                payload = tuple(part for _, part in db.execute(f"{contents} ORDER BY id", (*ids, *ids)))
                yield JournalEntry(_decode(body), payload)

    @contextlib.contextmanager
    def _connected(self, mode: str) -> Iterator[sqlite3.Connection]:
        uri = f"{self.path.absolute().as_uri()}?mode={mode}"
        with contextlib.closing(sqlite3.connect(uri, uri=True, isolation_level=None, timeout=60.0)) as db:
            yield db
