"""Where a run keeps what it saves: a local folder, or anything that fsspec can reach by a URL, such as S3.

A *folder* here has a manifest, which is written last and names what belongs to it. Readers believe manifests only, so a
writer that dies half-way leaves nothing that anybody takes for whole.

|          | local disk                                         | anywhere else                                    |
|----------|----------------------------------------------------|--------------------------------------------------|
| written  | into a folder beside it, to the disk, then renamed | below a fresh name within it, then the manifest  |
| replaced | in one operation                                   | by the new manifest; the old parts go afterwards |
| removed  | as a whole                                         | the manifest first                               |
"""

from __future__ import annotations

import ctypes
import glob
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import xxhash
from safetensors import SafetensorError

from starling.common.errors import ConfigError, StarlingError

MANIFEST: Final = "state.json"
_CHUNK: Final = 1 << 20


@dataclass
class Draft:
    """A folder that is being written."""

    storage: Storage
    parts: str
    """The name of the folder within it that the parts go to."""
    path: str
    """Where that is, for `Storage.fs`."""
    manifest: bytes = b""
    """To be set in the end."""


class Storage:
    """A place for folders, each of them whole or not there, and with one writer at a time."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        """Use `url`: a path, or ``protocol://...`` of fsspec, whose `options` say for example whom to call.

        Raises:
            ConfigError: nothing here knows such a URL, or such options.
        """
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem

        try:
            self.fs, self.root = url_to_fs(url, **(options or {}))
        except ImportError as error:
            extra = "; install starling-policy[s3]" if url.startswith("s3:") else ""
            raise ConfigError(f"{url} cannot be used here: {_first_line(error)}{extra}") from None
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{url} cannot be used: {_first_line(error)}; give a folder, or a URL and storage_options of fsspec"
            ) from None
        self.is_local = isinstance(self.fs, LocalFileSystem)

    def path(self, *names: str) -> str:
        """Return where something in it is, as `fs` calls it."""
        return "/".join((self.root.rstrip("/"), *names))

    def url(self, *names: str) -> str:
        """Return where something in it is, for people and other processes."""
        path = self.path(*names)
        return path if self.is_local else str(self.fs.unstrip_protocol(path))

    def below(self, *names: str) -> Storage:
        """Return the storage in a folder of this one."""
        inner = object.__new__(Storage)
        inner.fs, inner.root, inner.is_local = self.fs, self.path(*filter(None, names)), self.is_local
        return inner

    def names(self, *within: str) -> list[str]:
        """Return what lies directly in it, whole or not; nothing when there is no such folder."""
        with self.explained("listed", *within):
            self.fs.invalidate_cache()
            try:
                found = self.fs.ls(self.path(*within), detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted({str(path).rstrip("/").rpartition("/")[2] for path in found})

    def read(self, *names: str) -> bytes | None:
        """Return the bytes of a small file; None when it is not there."""
        with self.explained("read", *names):
            try:
                data: bytes = self.fs.cat_file(self.path(*names))
            except (FileNotFoundError, NotADirectoryError):
                return None
        return data

    def digest(self, *names: str) -> str | None:
        """Return the digest of a file as `starling.weightsync.plan.offer.digest_of` has it; None when it is not
        there."""
        state = xxhash.xxh3_128()
        with self.explained("read", *names):
            try:
                with self.fs.open(self.path(*names), "rb") as file:
                    while chunk := file.read(_CHUNK):
                        state.update(chunk)
            except FileNotFoundError:
                return None
        return state.hexdigest()

    @contextmanager
    def writing(self, name: str) -> Iterator[Draft]:
        """Lend a draft that becomes the folder `name`, all or nothing. What was there stays until then.

        Raises:
            ConfigError: the storage refuses.
        """
        if self.is_local:
            with self.explained("written", name):
                clear_leftovers(Path(self.root))  # there is but one writer
            with whole_folder(Path(self.path(name))) as temporary:
                (temporary / "parts").mkdir()
                draft = Draft(self, "parts", f"{temporary}/parts")
                yield draft
                (temporary / MANIFEST).write_bytes(draft.manifest)
            return
        parts = secrets.token_hex(4)
        with self.explained("written", name):
            draft = Draft(self, parts, self.path(name, parts))
            yield draft
            self.fs.pipe_file(self.path(name, MANIFEST), draft.manifest)
            self.keep_only(name, parts)

    def check(self) -> None:
        """See that one can write here, before anything depends on it. Raises ConfigError when not."""
        probe = self.path(f".probe-{secrets.token_hex(4)}")
        with self.explained("written"):
            if self.is_local:
                self.fs.makedirs(self.root, exist_ok=True)
            self.fs.pipe_file(probe, b"starling")
            self.fs.rm_file(probe)

    def keep_only(self, name: str, parts: str) -> None:
        """Remove what earlier writers left in the folder `name` beside its manifest and `parts`."""
        for other in self.names(name):
            if other not in (MANIFEST, parts):
                self.fs.rm(self.path(name, other), recursive=True)

    def remove(self, name: str) -> None:
        """Remove a folder. It is not whole from the first moment on."""
        with self.explained("removed", name):
            manifest = self.path(name, MANIFEST)
            if self.fs.exists(manifest):
                self.fs.rm_file(manifest)
            self.fs.rm(self.path(name), recursive=True)

    def send(self, folder: Path, name: str, *, last: str) -> None:
        """Copy the files of a local `folder` to the folder `name`, in place of what is there; `last` goes last."""
        if self.fs.exists(self.path(name)):
            if self.fs.exists(self.path(name, last)):
                self.fs.rm_file(self.path(name, last))
            self.fs.rm(self.path(name), recursive=True)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        for file in sorted(files, key=lambda file: file.name == last):
            self.fs.put_file(str(file), self.path(name, *file.relative_to(folder).parts))

    @contextmanager
    def explained(self, done: str, *names: str) -> Iterator[None]:
        """Turn what a storage's libraries raise, each its own, into a ConfigError that says what cannot be `done`."""
        try:
            yield
        except StarlingError:
            raise
        except Exception as error:  # whatever it is: the storage is the user's, and its libraries raise anything
            reason = getattr(error, "strerror", None) or _first_line(error)
            remedy = "free space or choose another folder" if self.is_local else "look at policy.saving and the storage"
            raise ConfigError(f"{self.url(*names)} cannot be {done} ({reason}): {remedy}") from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


# JOINED from starling.policy.train.folder: Write a folder on a local disk so that a crash never leaves half
# of one.

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
