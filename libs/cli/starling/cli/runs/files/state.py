"""State of a run, from its locks and its journal: running, ended, stopped or crashed."""

from __future__ import annotations

import fcntl
import os
import struct
from dataclasses import dataclass
from typing import Final, Literal

from starling.cli.run.attempt import Attempt
from starling.common.errors import StarlingError
from starling.common.files import open_own

_FLOCK: Final = "hhqqi"
"""`struct flock` of Linux on 64 bits: type, whence, start, length, pid."""


@dataclass(frozen=True)
class RunState:
    """What an attempt does now, or how it ended."""

    name: Literal["running", "ended", "stopped", "crashed"]
    """`ended`: it reached its end; `stopped`: an operator or a failure ended it early, and it can resume; `crashed`:
    nothing runs, and the journal has no end."""
    reason: str = ""


def state_of(attempt: Attempt) -> RunState:
    """Return the state of an attempt on this machine.

    A supervisor or a controller on another machine, whose locks are not seen here, looks like a crash.
    """
    from starling.controller.core.records import RunEnded
    from starling.controller.shell.journal.journal import last_ending  # only here: it imports the whole journal

    if _is_supervised(attempt) or _is_written(attempt):
        return RunState("running")
    if not attempt.journal.exists():
        return RunState("crashed", "it has no journal: no controller has begun it")
    try:
        ending = last_ending(attempt.journal)
    except StarlingError as error:
        return RunState("crashed", f"the journal cannot be read: {error}")
    if ending is None:
        return RunState("crashed", "nothing runs, and the journal has no end")
    return RunState("ended" if isinstance(ending, RunEnded) else "stopped", ending.reason)


def _is_supervised(attempt: Attempt) -> bool:
    """Return whether a supervisor holds the lock of the attempt."""
    return (attempt.folder / "lock").exists() and not attempt.is_over()


def _is_written(attempt: Attempt) -> bool:
    """Return whether a controller holds the lock of the journal; the lock is asked about, never taken."""
    try:
        descriptor = open_own(attempt.journal.with_name(f"{attempt.journal.name}.lock"))
    except OSError:
        return False
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        found = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return bool(found[0] != fcntl.F_UNLCK)
