"""Files that survive a power cut: written whole or not at all, and append-only files of JSON lines.

A rename replaces a file at once, but only a file that was synced before has its content after a power cut: without the
sync many file systems leave it empty, or as long as it was and full of zeros. Append-only files are not synced: a power
cut may cut off their end, or leave zeros or garbage there, so `complete_size` and `parse_line` look for both.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO, Final

from starling.common.errors import ConfigError

MAX_LINE_BYTES: Final = 16 << 20
"""Limit on one line of metrics.jsonl when it is read; the longest of a run have the ids of a step's prompts."""

CONTROLLER_FILES: Final = (
    "metrics.jsonl",
    "samples*.jsonl",
    "events-*.rec",
    "controller.json",
    "outcome.json",
    "journal.sqlite*",
    "trajectories/*",
    "weightsync/*",
    "logged/*",
)
"""Files that the controller reads and writes in the folder of a run."""

PROBE_BYTES: Final = 64 << 10
"""Size of the file that is written to find out whether a disk has space: more than fits beside an inode."""
_BLOCK: Final = 64 << 10
"""Bytes that are read at a time, in search of the last line."""


def write_whole(
    path: Path,
    content: bytes | str,
    *,
    private: bool = False,
    executable: bool = False,
    owner_of: Path | None = None,
) -> None:
    """Write a file so that readers see the old or the new content, also after a power cut.

    `private`: only the owner may read it. `executable`: all may read and run it. `owner_of`: where root writes it, the
    owner of this file or folder gets it. Raises OSError.
    """
    partial = path.with_name(f".{path.name}.partial")
    mode = 0o600 if private else 0o666
    # A new file: one that is there may be a link to another file, or be open in a process of another user.
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if owner_of is not None and os.geteuid() == 0:
                owner = owner_of.stat()
                os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
            if executable:
                os.fchmod(file.fileno(), 0o755)  # before the file has its name: others may run it from then on
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        partial.unlink(missing_ok=True)  # on a full disk it takes what little space there is
        raise OSError(error.errno, error.strerror, str(path)) from None  # the error of a write names no file
    os.replace(partial, path)
    sync_folder(path.parent)


def check_writable(folder: Path) -> None:
    """Write, sync and remove a small file in a folder, which is made if there is none.

    Raises OSError with the name of the folder: the disk is full or read-only, or the permission is missing.
    """
    probe = folder / f".probe-{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(bytes(PROBE_BYTES))
                file.flush()
                os.fsync(descriptor)  # some file systems find only now that there is no space
        finally:
            probe.unlink()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from None


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading, also through links.

    Raises OSError for anything else: to open a FIFO may take for ever, and a device may have no end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def open_own(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a file of the run in its folder, which may come from others. Returns the descriptor.

    Raises OSError for a symbolic link, and for anything else but a regular file: what is written through a link changes
    another file, and a FIFO or a device may block, or have no end.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(error.errno, "it is a symbolic link", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor


def check_own(folder: Path, patterns: Iterable[str]) -> None:
    """Refuse a run's folder with a link, a FIFO, a device or a folder in the place of one of its files.

    `patterns`: of the names of files in the folder, such as ``logs/*.log``; a link that leads nowhere is found, too.
    Raises ConfigError with the first one.
    """
    for pattern in patterns:
        parent = folder / Path(pattern).parent
        try:
            names = [name for name in os.listdir(parent) if fnmatchcase(name, Path(pattern).name)]
        except (FileNotFoundError, NotADirectoryError):
            continue
        for name in sorted(names):
            try:
                mode = (parent / name).lstat().st_mode
            except FileNotFoundError:  # removed meanwhile
                continue
            if not stat.S_ISREG(mode):
                what = "a symbolic link, which is not followed" if stat.S_ISLNK(mode) else "not a regular file"
                raise ConfigError(f"{parent / name} is {what}; move it away")


def read_lines(path: Path, begin: int = 0) -> Iterator[bytes]:
    """Yield the lines of a file of a run from a position on; nothing where there is no file.

    Raises ConfigError when the file is no regular one or cannot be read, or for a line of more than `MAX_LINE_BYTES`.
    """
    try:
        with os.fdopen(open_own(path), "rb") as file:
            file.seek(begin)
            while line := file.readline(MAX_LINE_BYTES):
                if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                    raise ConfigError(f"{path} has a line of more than {MAX_LINE_BYTES >> 20} MiB; remove the line")
                yield line
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; move the file away") from None


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Make everything in a folder durable, and then the folder. Raises OSError."""
    for path in folder.rglob("*"):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    sync_folder(folder)


def complete_size(descriptor: int) -> int:
    """Return the size of a file of lines without an incomplete last one."""
    end = os.fstat(descriptor).st_size
    while end > 0:
        begin = max(0, end - _BLOCK)
        found = os.pread(descriptor, end - begin, begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a line; None for a line that is incomplete, or is none because it was damaged."""
    if not line.endswith(b"\n"):
        return None
    try:
        value = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
