"""Write a folder on a local disk so that a crash never leaves half of one."""

from __future__ import annotations

import ctypes
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from starling.common.errors import ConfigError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_SAVING = ".saving-"
_OLD = ".old"
"""How the name ends of a folder that is being replaced, where two names cannot be exchanged."""


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Lend a folder to write into that becomes `folder` at the end, all or nothing.

    Everything goes into a folder beside it and reaches the disk before that takes the name `folder`. A checkpoint of
    that name stays whole until then and is replaced in one operation where the file system can exchange two names
    (Linux), else by two renames. What an earlier crash left beside `folder` is removed; see `clear_leftovers`.

    Raises:
        ConfigError: the file system refuses: no space, no permission, or `folder` is a file.
    """
    folder = folder.absolute()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"the checkpoint {folder} is a file: remove it or choose another folder")
        clear_leftovers(folder.parent, folder.name)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}{_SAVING}", dir=folder.parent))
        try:
            temporary.chmod(0o755)
            yield temporary
            _sync_tree(temporary)
            _replace(temporary, folder)
            _sync(folder.parent)
        finally:
            # Gone when all went well; the previous checkpoint after an exchange; else what was written so far.
            shutil.rmtree(temporary, ignore_errors=True)
    except (OSError, SafetensorError) as error:  # the latter is how safetensors tells of a full disk
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(
            f"the checkpoint {folder} cannot be written ({reason}): free space or choose another folder"
        ) from error


def clear_leftovers(parent: Path, name: str | None = None) -> None:
    """Remove what crashed writers of `parent`'s folder `name`, by default of any, left beside it. None may be at work.

    A folder that lost its name to a writer that then crashed, before the new one had it, gets its name back: it may be
    the only copy.

    Raises:
        OSError: it cannot have it.
    """
    for leftover in parent.glob(f".{'*' if name is None else glob.escape(name)}{_SAVING}*"):
        folder = parent / leftover.name[1:].rpartition(_SAVING)[0]
        if leftover.name.endswith(_OLD) and not folder.exists():
            leftover.rename(folder)
        else:
            shutil.rmtree(leftover, ignore_errors=True)


def _replace(new: Path, folder: Path) -> None:
    if not folder.exists():
        new.rename(folder)
    elif not _exchange(new, folder):
        old = new.with_name(f"{new.name}{_OLD}")
        folder.rename(old)
        new.rename(folder)
        shutil.rmtree(old)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one operation; False where the system or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    result = renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE))
    return bool(result == 0)


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
