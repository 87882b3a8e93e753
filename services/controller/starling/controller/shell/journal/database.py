"""The journal's file: made, opened, checked, and locked for the one who writes it."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from starling.common.errors import ConfigError

VERSION: Final = 3
"""Of the tables and of the records' encoding."""
APPLICATION: Final = 0x53544C4E
"""Marks a SQLite file as one of ours."""
PAGE_BYTES: Final = 8 << 10
"""A payload is a few buffers of some KiB: in SQLite's usual pages of 4 KiB a third of the file would be empty."""
WAL_PAGES: Final = 500
"""Pages in the write-ahead log before a commit copies them into the file, which makes that commit some 10 ms longer.
Four times as many make it 50 ms and save nothing, since payloads are written once."""
WAL_BYTES: Final = 64 << 20
"""A write-ahead log that grew beyond this, on a full disk for example, is cut afterwards."""
_SCHEMA: Final = (
    "CREATE TABLE records (seq INTEGER PRIMARY KEY, body BLOB NOT NULL)",
    "CREATE TABLE contents (id INTEGER PRIMARY KEY, body BLOB NOT NULL)",
    "CREATE TABLE groups (key TEXT PRIMARY KEY, generated INTEGER NOT NULL, taught INTEGER, scored INTEGER, "
    "step INTEGER, rank INTEGER) WITHOUT ROWID",
    "CREATE TABLE partials (key TEXT PRIMARY KEY, seq INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE INDEX groups_of_step ON groups (step, rank)",
    "CREATE TABLE adopted (name TEXT PRIMARY KEY, seq INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE marks (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    f"PRAGMA application_id = {APPLICATION}",
    f"PRAGMA user_version = {VERSION}",
)


def open_file(path: Path) -> sqlite3.Connection:
    """Open the journal at `path`, or make it. Raises ConfigError for a file that is none, or of another version."""
    db = sqlite3.connect(path, isolation_level=None)
    try:
        if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
            db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("BEGIN IMMEDIATE")
            for statement in _SCHEMA:
                db.execute(statement)
            db.executemany("INSERT INTO marks VALUES (?, ?)", [("committed", -1), ("pruned", -1)])
            db.execute("COMMIT")
        check_file(path, db)
        # FULL: the write-ahead log is synced at every commit. NORMAL would survive a kill too, but not a power cut.
        db.execute("PRAGMA synchronous = FULL")
        db.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
        db.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
        db.execute("PRAGMA temp_store = MEMORY")
    except BaseException:  # nobody will close what is not returned
        db.close()
        raise
    return db


def check_file(path: Path, db: sqlite3.Connection) -> None:
    """Raise ConfigError for a database of another program, or of another version."""
    if db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION:
        raise ConfigError(f"{path} is a database of another program, not a journal; give the run another folder")
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version != VERSION:
        raise ConfigError(
            f"{path} is a journal of version {version} and this Starling has version {VERSION}; "
            "take the run up with the Starling that began it, or begin it anew in another folder"
        )


def lock_file(path: Path) -> int:
    """Lock the file beside the journal. Raises ConfigError.

    The lock belongs to this process and to no child of it, so it ends with this process, however that ends.
    """
    lock_path = path.with_name(f"{path.name}.lock")
    try:
        file = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(
            f"cannot open {lock_path}: {error.strerror}; the journal needs a folder to write in"
        ) from None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(file, 0)
        os.pwrite(file, str(os.getpid()).encode(), 0)
    except (BlockingIOError, PermissionError):
        holder = os.pread(file, 32, 0).decode(errors="replace") or "unknown"
        os.close(file)
        raise ConfigError(
            f"the controller with pid {holder} writes the journal {path}; end that one, or give the run another folder"
        ) from None
    except OSError as error:
        os.close(file)
        raise ConfigError(
            f"cannot lock {lock_path}: {error.strerror}; the journal needs a local disk with room"
        ) from None
    return file


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn what SQLite and the decoder say of a file into a ConfigError."""
    try:
        yield
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_NOTADB:
            raise ConfigError(f"{path} is no journal; move the file away, or give the run another folder") from None
        raise ConfigError(f"the journal {path} cannot be read: {error}; restore it, or begin the run anew") from None
    except (msgspec.DecodeError, ValueError, TypeError, KeyError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"the journal {path} is damaged: {error}; restore it, or begin the run anew") from None
