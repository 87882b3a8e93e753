"""Store in an SQLite file, for one instance: pending requests with their bodies, and results until they expire.

The file is written by one thread. Operations that wait while it commits are the next transaction, so that many
concurrent requests share the time of one sync. The write-ahead log is synced at every commit: what was accepted
survives the end of the process, and of the machine.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from starling.common.errors import ConfigError
from starling.common.files import check_own
from starling.reward.http.errors import StoreUnavailable
from starling.reward.http.stores.batches import Availability, Batches
from starling.reward.http.stores.store import (
    ENTRY_BYTES,
    PENDING,
    Pending,
    StoredRequest,
    decode_request,
    encode_large,
    unreadable_request,
)

log = structlog.get_logger(__name__)

APPLICATION: Final = 0x53545251
"""SQLite application id of a store of requests."""
VERSION: Final = 1
"""Of the schema."""
PATIENCE_S: Final = 10.0
WAL_BYTES: Final = 64 << 20
"""A write-ahead log that has grown beyond this is truncated afterwards."""
MAX_RECORD_BYTES: Final = 900 << 20
"""SQLite takes up to 10^9 bytes; a record that it refuses would be the failure of its whole transaction."""
BYTES_PER_S: Final = 10 << 20
"""What is expected of the disk."""
PURGE_INTERVAL_S: Final = 1.0
MAX_TAKEN: Final = 64
"""Requests that are read at a time."""
_SCHEMA: Final = (
    "CREATE TABLE pending (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, "
    "num_samples INTEGER NOT NULL, num_bytes INTEGER NOT NULL, num_deaths INTEGER NOT NULL, "
    "request BLOB NOT NULL) STRICT",
    "CREATE TABLE results (id TEXT NOT NULL PRIMARY KEY, expires_at REAL NOT NULL, result BLOB NOT NULL) STRICT",
    "CREATE INDEX results_by_expiry ON results (expires_at)",
)
# A damaged file can have values of any type.
_RESULT: Final = "CAST(coalesce(result, '') AS BLOB)"
_LENGTH: Final = "coalesce(length(result), 0)"
_COUNTS: Final = "CAST(coalesce(num_samples, 0) AS INTEGER), CAST(coalesce(num_bytes, 0) AS INTEGER)"
_DEATHS: Final = "CAST(coalesce(num_deaths, 0) AS INTEGER) + (owner != '')"
_ERRORS: Final = (sqlite3.Error, UnicodeDecodeError)
"""The text of an error repeats names of a damaged file, which may be no UTF-8."""

Work = Callable[[sqlite3.Connection], Any]
"""One operation in the thread of the file, within a transaction."""


class SqliteStore:
    """Requests and results of one instance, in a file.

    Args:
        path: the file; it is created, readable for its owner only.
        result_ttl_s: how long a result is kept, in seconds of the wall clock.
        clock: wall clock, seconds since 1970.
        patience_s: how long a request waits for the disk before its client is told to try again, in seconds.

    Raises:
        ConfigError: the file cannot be used, or another process uses it.
    """

    renew_interval_s = PURGE_INTERVAL_S

    def __init__(
        self,
        path: Path,
        result_ttl_s: float,
        clock: Callable[[], float] = time.time,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._result_ttl_s, self._clock, self._patience_s = result_ttl_s, clock, patience_s
        self._owner = secrets.token_hex(8)
        self._db = _open_file(path)
        try:
            num, size = self._db.execute("SELECT count(*), total(length(result)) FROM results").fetchone()
        except _ERRORS as error:
            self._db.close()
            raise ConfigError(f"{path} cannot be read: {error}; restore it, or move it away") from None
        self.num_results, self.size_bytes = int(num), int(size) + ENTRY_BYTES * int(num)
        self._availability = Availability("sqlite")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._batches: Batches[tuple[Work, int]] = Batches(self._in_thread, lambda operation: operation[1])
        self._forgetting: set[asyncio.Task[None]] = set()
        self._last_taken = 0
        self._is_closed = False
        self._has_others = True
        """Whether there may be requests of an earlier process."""

    @property
    def problem(self) -> str:
        """Why the file cannot be written; empty if it can."""
        return self._availability.problem

    async def open(self) -> None:
        """Do nothing: the file is open."""

    async def put(self, request: StoredRequest) -> None:
        """Write a pending request."""
        data = await encode_large(request, MAX_RECORD_BYTES)
        row = request.id, self._owner, request.num_samples, request.num_bytes, request.num_deaths, data
        try:
            await self._run(partial(_put, row=row), len(data))
        except BaseException:
            # It may have been written, or may still be. Its client was not told its id, so it shall not be scored.
            task = asyncio.get_running_loop().create_task(self._forget(request.id))
            self._forgetting.add(task)
            task.add_done_callback(self._forgetting.discard)
            raise

    async def finish(self, request: StoredRequest, result: bytes) -> bytes | None:
        """Write a result, in place of the pending request."""
        work = partial(self._finish, id=request.id, result=result)
        first: bytes | None = await self._run(work, len(result), is_patient=True)
        return first

    async def find(self, id: str) -> bytes | Pending | None:
        """Read the result of a request."""
        found: bytes | Pending | None = await self._run(partial(self._find, id=id))
        return found

    async def remove(self, id: str) -> bool:
        """Delete a request and its result."""
        return bool(await self._run(partial(self._remove, id=id)))

    async def take(self, max_samples: int, max_bytes: int) -> list[StoredRequest]:
        """Read requests of an earlier process, in the order in which they were accepted."""
        if not self._has_others:
            return []
        take = partial(self._take, after=self._last_taken, max_samples=max_samples, max_bytes=max_bytes)
        rows = await self._run(take, is_patient=True)
        self._has_others = bool(rows)
        if rows:
            self._last_taken = rows[-1][0]
        return [_request_of(*row[1:]) for row in rows]

    async def renew(self) -> set[str]:
        """Delete results that have expired. No other instance can take requests."""
        await self._run(self._purge)
        return set()

    async def close(self) -> None:
        """Give back the requests that have no result, and close the file."""
        try:
            await self._run(partial(_release, owner=self._owner))
        finally:
            self._is_closed = True
            await asyncio.get_running_loop().run_in_executor(self._thread, self._db.close)
            self._thread.shutdown(wait=False)

    async def _run(self, work: Work, size_bytes: int = 0, *, is_patient: bool = False) -> Any:
        timeout_s = None if is_patient else self._patience_s + size_bytes / BYTES_PER_S
        return await self._batches.run((work, size_bytes), timeout_s)

    async def _forget(self, id: str) -> None:
        with suppress(StoreUnavailable):  # then it is scored after the next start
            await self._run(partial(self._remove, id=id), is_patient=True)

    async def _in_thread(self, batch: Sequence[tuple[Work, int]]) -> Sequence[Any]:
        if self._is_closed:
            raise StoreUnavailable("it is closed")
        works = [work for work, _ in batch]
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._commit, works)

    # --- in the thread of the file ------------------------------------------------------------------------------------

    def _commit(self, works: Sequence[Work]) -> list[Any]:
        counts = self.num_results, self.size_bytes
        try:
            self._db.execute("BEGIN IMMEDIATE")
            outcomes = [work(self._db) for work in works]
            self._db.execute("COMMIT")
        except BaseException as error:
            self.num_results, self.size_bytes = counts
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            if not isinstance(error, _ERRORS):
                raise
            self._availability.failed(str(error))
            raise StoreUnavailable(str(error)) from None
        self._availability.succeeded()
        return outcomes

    def _finish(self, db: sqlite3.Connection, id: str, result: bytes) -> bytes | None:
        first = db.execute(f"SELECT {_RESULT} FROM results WHERE id = ?", (id,)).fetchone()
        if first is not None:
            return bytes(first[0])
        if not db.execute("DELETE FROM pending WHERE id = ?", (id,)).rowcount:
            return None
        db.execute("INSERT INTO results VALUES (?, ?, ?)", (id, self._clock() + self._result_ttl_s, result))
        self._count(1, len(result))
        return result

    def _find(self, db: sqlite3.Connection, id: str) -> bytes | Pending | None:
        query = f"SELECT {_RESULT}, expires_at > ? FROM results WHERE id = ?"
        row = db.execute(query, (self._clock(), id)).fetchone()
        if row is not None:
            return bytes(row[0]) if row[1] else None
        return PENDING if db.execute("SELECT 1 FROM pending WHERE id = ?", (id,)).fetchone() else None

    def _remove(self, db: sqlite3.Connection, id: str) -> bool:
        if db.execute("DELETE FROM pending WHERE id = ?", (id,)).rowcount:
            return True
        query = f"DELETE FROM results WHERE id = ? RETURNING {_LENGTH}, expires_at > ?"
        row = db.execute(query, (id, self._clock())).fetchone()
        if row is None:
            return False
        self._count(-1, -row[0])
        return bool(row[1])

    def _take(
        self, db: sqlite3.Connection, after: int, max_samples: int, max_bytes: int
    ) -> list[tuple[int, str, int, int, bytes]]:
        taken: list[tuple[int, str, int, int, bytes]] = []
        while not taken or (len(taken) < MAX_TAKEN and max_samples > 0 and max_bytes > 0):
            row = db.execute(
                f"SELECT number, CAST(coalesce(id, '') AS TEXT), {_COUNTS}, {_DEATHS}, request FROM pending "
                "WHERE number > ? AND owner != ? ORDER BY number LIMIT 1",
                (after, self._owner),
            ).fetchone()
            if row is None:
                break
            after, id, num_samples, num_bytes, num_deaths, request = row
            db.execute(
                "UPDATE pending SET owner = ?, num_deaths = ? WHERE number = ?", (self._owner, num_deaths, after)
            )
            max_samples -= num_samples
            max_bytes -= num_bytes
            taken.append((after, id, num_samples, num_deaths, request))
        return taken

    def _purge(self, db: sqlite3.Connection) -> None:
        query = f"DELETE FROM results WHERE expires_at <= ? RETURNING {_LENGTH}"
        rows = db.execute(query, (self._clock(),)).fetchall()
        self._count(-len(rows), -sum(row[0] for row in rows))

    def _count(self, num: int, size_bytes: int) -> None:
        self.num_results += num
        self.size_bytes += size_bytes + num * ENTRY_BYTES


def _put(db: sqlite3.Connection, row: tuple[Any, ...]) -> None:
    columns = "id, owner, num_samples, num_bytes, num_deaths, request"
    db.execute(f"INSERT INTO pending ({columns}) VALUES (?, ?, ?, ?, ?, ?)", row)


def _release(db: sqlite3.Connection, owner: str) -> None:
    db.execute("UPDATE pending SET owner = '' WHERE owner = ?", (owner,))


def _request_of(id: str, num_samples: object, num_deaths: int, data: object) -> StoredRequest:
    """Return a stored request; one that no reader knows in place of one that cannot be decoded."""
    try:
        return msgspec.structs.replace(decode_request(data), id=id, num_deaths=num_deaths)
    except ValueError as error:
        log.warning("stored_request_refused", id=id, reason=str(error))
        return unreadable_request(id, num_samples)


def _open_file(path: Path) -> sqlite3.Connection:
    """Open or create the file at `path`, for this process alone. Raises ConfigError."""
    check_own(path.parent, [f"{path.name}{suffix}" for suffix in ("", "-wal", "-journal")])
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        db = sqlite3.connect(path, timeout=0.0, isolation_level=None, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot open {path}: {reason}; set reward.http.store_path to a file on a local disk"
        ) from None
    try:
        db.text_factory = lambda text: text.decode(errors="replace")  # of a damaged file
        db.execute("PRAGMA trusted_schema = OFF")
        db.execute("PRAGMA locking_mode = EXCLUSIVE")  # until the process ends, however it ends
        db.execute("BEGIN IMMEDIATE")
        _check_schema(path, db)
        db.execute("COMMIT")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
    except BaseException as error:
        db.close()
        if not isinstance(error, _ERRORS):
            raise
        if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:
            raise ConfigError(
                f"{path} is in use by another process; give each reward service a reward.http.store_path of its own"
            ) from None
        raise ConfigError(f"{path} cannot be used: {error}; restore it, or move it away") from None
    return db


def _check_schema(path: Path, db: sqlite3.Connection) -> None:
    """Write the schema into an empty file. Raises ConfigError for a file with another one.

    The schema is part of the file. SQLite would run a trigger in it at each write, and a view at each read.
    """
    found = [row[0] for row in db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid")]
    if not found:
        for statement in _SCHEMA:
            db.execute(statement)
        db.execute(f"PRAGMA application_id = {APPLICATION}")
        db.execute(f"PRAGMA user_version = {VERSION}")
        return
    application, version = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
    if application != APPLICATION:
        raise ConfigError(f"{path} is a database of another application; set reward.http.store_path to another file")
    if version != VERSION or found != list(_SCHEMA):
        raise ConfigError(
            f"{path} is a store of version {version}, or was changed, and this Starling has version {VERSION}; set "
            "reward.http.store_path to another file"
        )
