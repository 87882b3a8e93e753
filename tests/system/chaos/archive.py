"""Archive of a run's journal: every record and payload that the controller deletes, in a file of its own.

The controller's processes load `preloaded/sitecustomize.py`, which writes it. Connections to the journal are read-only,
and open only while the controller runs: the last one to close would complete the write-ahead log, which a restarted
controller has to do.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from starling.controller.core.records import JournalEntry
from starling.controller.shell.journal.journal import _PARTS, _marks
from starling.controller.shell.journal.rows import Binding, decode

PRELOADED = Path(__file__).with_name("preloaded")
WRITE_LOCK = 120
"""Byte of the index of the write-ahead log that its writer locks (sqlite.org/walformat.html)."""


class JournalArchive:
    """The journal of a run with all that it ever held, and its compactions, one of which can be made slow."""

    def __init__(self, path: Path, archive: Path) -> None:
        """`path`: of the journal, which need not exist yet; `archive`: of the file for what is deleted from it."""
        self.path, self.archive = path.absolute(), archive.absolute()
        self._index = path.with_name(f"{path.name}-shm")
        self._pause = self.archive.with_name(f"{archive.name}.pause")

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for the processes of the run."""
        folders = [str(PRELOADED), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            "PYTHONPATH": os.pathsep.join(folders),
            "ARCHIVED_JOURNAL": str(self.path),
            "ARCHIVE_OF_JOURNAL": str(self.archive),
        }

    def has_begun(self) -> bool:
        """Say whether there is a journal, whose controller keeps what it deletes."""
        return self._index.exists() and self.archive.exists()

    def pause_compactions(self, pid: int) -> None:
        """Make the compactions of this controller, and of no later one, last for seconds."""
        self._pause.write_text(str(pid))

    def num_records(self) -> int:
        """Return the number of records since the last compaction, or since the beginning."""
        with _reading(self.path) as db:
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
        with _reading(self.archive) as archive, _reading(self.path) as db:
            db.execute("BEGIN")
            binding = Binding.of(_marks(db))
            for seq, body in _rows(archive, db, "records", "seq"):
                where = f"WHERE id > {seq << _PARTS} AND id < {(seq + 1) << _PARTS}"  # part 0 is the record again
                payload = tuple(part for _, part in _rows(archive, db, "contents", "id", where))
                yield JournalEntry(decode(body, binding.of_record(seq)), payload)


def _rows(
    archive: sqlite3.Connection, db: sqlite3.Connection, table: str, key: str, where: str = ""
) -> list[tuple[int, bytes]]:
    """Return the rows of both files by their keys; the journal's where both have one."""
    rows = dict(archive.execute(f"SELECT id, body FROM {table} {where}").fetchall())
    rows |= dict(db.execute(f"SELECT {key}, body FROM {table} {where}").fetchall())
    return sorted(rows.items())


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    uri = f"{path.as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True, isolation_level=None, timeout=60.0)) as db:
        yield db
