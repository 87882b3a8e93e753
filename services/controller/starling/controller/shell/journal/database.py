"""SQLite file of the journal: its schema, how it is opened and checked, and the lock of its only writer."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from starling.common.errors import ConfigError, RestartError
from starling.common.files import check_own
from starling.controller.shell.journal.rows import BINDING, BOUND_SINCE

VERSION: Final = 5
"""Version of the schema and of the encoding of the records."""
UPGRADED: Final = (3, 4)
"""Versions that `open_file` upgrades: 3 has no `groups.rewards` and no compaction, 4 has digests without a place."""
APPLICATION: Final = 0x53544C4E
"""SQLite application id of a journal."""
PAGE_BYTES: Final = 8 << 10
"""A payload is a few buffers of some KiB: with SQLite's default of 4 KiB a third of the file would be empty."""
WAL_PAGES: Final = 500
"""Pages in the write-ahead log before a commit copies them into the file, which takes about 10 ms. Four times as many
pages take 50 ms and save nothing, because payloads are written once."""
WAL_BYTES: Final = 64 << 20
"""A write-ahead log that grew beyond this, for example on a full disk, is truncated afterwards."""
FULL: Final = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)
"""Errors of a full disk: for the file or its log, and for the index of the log."""
_SCHEMA: Final = (
    "CREATE TABLE records (seq INTEGER PRIMARY KEY, body BLOB NOT NULL)",
    "CREATE TABLE contents (id INTEGER PRIMARY KEY, body BLOB NOT NULL)",
    "CREATE TABLE groups (key TEXT PRIMARY KEY, generated INTEGER NOT NULL, taught INTEGER, "
    "step INTEGER, rank INTEGER, rewards BLOB) WITHOUT ROWID",
    "CREATE TABLE partials (key TEXT PRIMARY KEY, seq INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE INDEX groups_of_step ON groups (step, rank)",
    "CREATE TABLE adopted (name TEXT PRIMARY KEY, seq INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE marks (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    f"PRAGMA application_id = {APPLICATION}",
    f"PRAGMA user_version = {VERSION}",
)


def open_file(path: Path) -> sqlite3.Connection:
    """Open or create the journal at `path`. Raises ConfigError for another kind of file, version or schema."""
    db = sqlite3.connect(path, isolation_level=None)
    try:
        distrust(db)
        if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
            db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("BEGIN IMMEDIATE")
            for statement in _SCHEMA:
                db.execute(statement)
            db.executemany("INSERT INTO marks VALUES (?, ?)", [("committed", -1), ("pruned", -1)])
            _bind(db)
            db.execute("COMMIT")
        version = check_file(path, db)
        check_schema(path, db)
        if version in UPGRADED:
            _upgrade(db, version)
        # FULL syncs the write-ahead log at every commit. NORMAL would survive a kill too, but not a power failure.
        db.execute("PRAGMA synchronous = FULL")
        db.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
        db.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
        db.execute("PRAGMA temp_store = MEMORY")
    except BaseException:  # the caller cannot close what is not returned
        db.close()
        raise
    return db


def distrust(db: sqlite3.Connection) -> None:
    """Let no expression of the file's own schema call a function that reaches beyond the file."""
    db.execute("PRAGMA trusted_schema = OFF")


def _bind(db: sqlite3.Connection) -> None:
    """Bind the rows that will be written to this journal and to their positions."""
    db.execute("INSERT INTO marks VALUES (?, ?)", (BINDING, secrets.randbits(62) + 1))
    db.execute("INSERT INTO marks SELECT ?, coalesce(max(seq), 0) + 1 FROM records", (BOUND_SINCE,))


def _upgrade(db: sqlite3.Connection, version: int) -> None:
    """Bring a journal of an older version to this one."""
    db.execute("BEGIN IMMEDIATE")
    if version == 3:
        # The rewards of a group with its contents, so that compaction may delete the record that has them.
        db.execute("ALTER TABLE groups ADD COLUMN rewards BLOB")
        db.execute("UPDATE groups SET rewards = (SELECT body FROM records WHERE seq = scored) WHERE scored IS NOT NULL")
    _bind(db)
    db.execute(f"PRAGMA user_version = {VERSION}")
    db.execute("COMMIT")


def check_file(path: Path, db: sqlite3.Connection) -> int:
    """Return the version of a journal. Raises ConfigError for another application or a version that is unknown."""
    if db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION:
        raise ConfigError(f"{path} is a database of another application, not a journal; give the run another folder")
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version not in (VERSION, *UPGRADED):
        raise ConfigError(
            f"{path} is a journal of version {version} and this Starling has version {VERSION}; "
            "resume the run with the version that began it, or begin a new run in another folder"
        )
    return int(version)


def check_schema(path: Path, db: sqlite3.Connection) -> None:
    """Raise ConfigError for a journal whose schema contains triggers, views or virtual tables.

    The schema is part of the file. SQLite would run a trigger in it at each write and a view at each read: these can
    delete records, or never end. They, and virtual tables, have no page of their own in the file, and are refused.
    """
    query = "SELECT type, name FROM sqlite_master WHERE type NOT IN ('table', 'index') OR coalesce(rootpage, 0) = 0"
    foreign = db.execute(query).fetchone()
    if foreign is not None:
        kind = "virtual table" if foreign[0] == "table" else foreign[0]
        raise ConfigError(
            f"{path} has the {kind} {foreign[1]!r:.200}, which no journal has; restore the journal, or begin a new run"
        )


def check_place(path: Path) -> None:
    """Raise ConfigError where a link or something else than a file is in the place of the journal or of its log.

    SQLite follows links, and would write into the file that they lead to.
    """
    check_own(path.parent, [f"{path.name}{suffix}" for suffix in ("", "-wal", "-shm", "-journal")])


def lock_file(path: Path) -> int:
    """Lock `<path>.lock` for this process, and return its file descriptor. Raises ConfigError.

    Children do not inherit the lock, so it is released when this process ends, however it ends.
    """
    lock_path = path.with_name(f"{path.name}.lock")
    try:
        file = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)  # it is truncated
    except OSError as error:
        raise ConfigError(f"cannot open {lock_path}: {error.strerror}; the journal needs a writable folder") from None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(file, 0)
        os.pwrite(file, str(os.getpid()).encode(), 0)
    except (BlockingIOError, PermissionError):
        holder = os.pread(file, 32, 0).decode(errors="replace") or "unknown"
        os.close(file)
        raise ConfigError(
            f"the journal {path} is in use by the controller with pid {holder}; stop it, or give the run another folder"
        ) from None
    except OSError as error:
        os.close(file)
        raise ConfigError(
            f"cannot lock {lock_path}: {error.strerror}; the journal needs a local disk with free space"
        ) from None
    return file


def _is_full(error: sqlite3.Error, folder: Path) -> bool:
    """Return whether a full disk is the reason of an error: for some files SQLite only says that it cannot write."""
    code = getattr(error, "sqlite_errorcode", 0)
    if code in FULL:
        return True
    try:
        return code & 0xFF == sqlite3.SQLITE_IOERR and os.statvfs(folder).f_bavail == 0
    except OSError:
        return False


def unwritable(path: Path, error: sqlite3.Error) -> str:
    """Return the error sentence for a journal that cannot be written: SQLite does not say that a disk is read-only.

    Linux makes a file system read-only when it finds an error in it.
    """
    if _is_read_only(path.parent):
        return (
            f"the journal {path} cannot be written: its file system is read-only; see the kernel's log for the reason, "
            "and resume the run when it can be written"
        )
    return f"the journal {path} cannot be written: {error}; check its disk"


def _is_read_only(folder: Path) -> bool:
    """Return whether no file can be made in a folder because its file system is read-only."""
    try:
        # A file without a name; to close one of the journal's would release SQLite's locks.
        os.close(os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except OSError as error:
        return error.errno == errno.EROFS
    return False


@contextmanager
def as_config_error(path: Path) -> Iterator[None]:
    """Convert errors of SQLite and of the decoder to ConfigError, and those of the disk to RestartError."""
    try:
        yield
    except sqlite3.Error as error:
        if _is_full(error, path.parent):
            raise RestartError(
                f"the disk of the journal {path} is full; free some space, and start the run again"
            ) from None
        if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_IOERR:
            raise RestartError(f"the journal {path} cannot be read: {error}; check its disk") from None
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_NOTADB:
            raise ConfigError(f"{path} is not a journal; move the file away, or give the run another folder") from None
        raise ConfigError(f"the journal {path} cannot be read: {error}; restore it, or begin a new run") from None
    except (msgspec.DecodeError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"the journal {path} is damaged: {error}; restore it, or begin a new run") from None
