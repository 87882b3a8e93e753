"""Crash-safe folders on a local disk, or on any file system of fsspec, such as S3.

A *folder* here has a manifest, which is written last and names its parts. Readers trust manifests only, so a writer
that dies half-way leaves nothing that a reader takes for complete.

|          | local disk                                    | any other file system                               |
|----------|-----------------------------------------------|-----------------------------------------------------|
| written  | into a temporary folder, synced, then renamed | below a new name within it, then the manifest       |
| replaced | in one operation                              | by the new manifest; the old parts are removed next |
| removed  | as a whole                                    | the manifest first                                  |
"""

from __future__ import annotations

import ctypes
import errno
import glob
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

import xxhash
from safetensors import SafetensorError

from starling.common.errors import ConfigError, DiskFaultError, StarlingError
from starling.common.files import check_writable, open_own, open_regular, sync_folder, sync_tree
from starling.common.observe.process import DISK_FAULTS
from starling.common.secret_settings import without_passwords

MANIFEST: Final = "state.json"
MAX_SMALL_BYTES: Final = 64 << 20
"""Largest manifest or other description of a folder."""
_CHUNK: Final = 1 << 20
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_SAVING = ".saving-"
_OLD = ".old"
"""Suffix of a folder that is being replaced, where two names cannot be exchanged."""


@dataclass
class Draft:
    """A folder that is being written."""

    storage: Storage
    parts: str
    """Name of the subfolder for the parts."""
    path: str
    """Path of that subfolder on `Storage.fs`."""
    manifest: bytes = b""
    """Set by the writer at the end."""


class Storage:
    """A directory of crash-safe folders with one writer at a time."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        """Use `url`: a path, or ``protocol://...`` of fsspec with its `options`, such as ``endpoint_url``.

        Raises:
            ConfigError: the URL or an option is not supported here.
        """
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem

        try:
            self.fs, self.root = url_to_fs(url, **(options or {}))
        except ImportError as error:
            extra = "; install starling-policy[s3]" if url.startswith("s3:") else ""
            raise ConfigError(f"{without_passwords(url)} cannot be used here: {_first_line(error)}{extra}") from None
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{without_passwords(url)} cannot be used: {_first_line(error)}; give a folder, or a URL and "
                "storage_options of fsspec"
            ) from None
        self.is_local = isinstance(self.fs, LocalFileSystem)

    def path(self, *names: str) -> str:
        """Return the path of an entry on `fs`."""
        return "/".join((self.root.rstrip("/"), *names))

    def url(self, *names: str) -> str:
        """Return the URL of an entry, for people and other processes."""
        path = self.path(*names)
        return path if self.is_local else str(self.fs.unstrip_protocol(path))

    def below(self, *names: str) -> Storage:
        """Return the storage in a subfolder."""
        inner = object.__new__(Storage)
        inner.fs, inner.root, inner.is_local = self.fs, self.path(*filter(None, names)), self.is_local
        return inner

    def names(self, *within: str) -> list[str]:
        """Return the names of the direct entries, complete or not; nothing if there is no such folder."""
        with self.explained("listed", *within):
            self.fs.invalidate_cache()
            try:
                found = self.fs.ls(self.path(*within), detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted({str(path).rstrip("/").rpartition("/")[2] for path in found})

    def read(self, *names: str) -> bytes | None:
        """Return the bytes of a small file; None if it does not exist.

        Raises:
            ConfigError: the storage fails, or the file has more than `MAX_SMALL_BYTES`.
        """
        with self.explained("read", *names):
            try:
                with open_file(self.fs, self.path(*names)) as file:
                    data: bytes = file.read(MAX_SMALL_BYTES + 1)
            except (FileNotFoundError, NotADirectoryError):
                return None
            if len(data) > MAX_SMALL_BYTES:
                raise ValueError(f"it has more than {MAX_SMALL_BYTES} bytes")
        return data

    def digest(self, *names: str) -> str | None:
        """Return the digest of a file as `starling.weightsync.offers.offer.digest_of` has it; None when it is not
        there."""
        state = xxhash.xxh3_128()
        with self.explained("read", *names):
            try:
                with open_file(self.fs, self.path(*names)) as file:
                    while chunk := file.read(_CHUNK):
                        state.update(chunk)
            except FileNotFoundError:
                return None
        return state.hexdigest()

    @contextmanager
    def writing(self, name: str) -> Iterator[Draft]:
        """Lend a draft that replaces the folder `name` at the end, all or nothing.

        Raises:
            ConfigError: the storage fails.
        """
        if self.is_local:
            with self.explained("written", name):
                clear_leftovers(Path(self.root))  # there is only one writer
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

    def check(self, *names: str) -> None:
        """Check that files can be written, on a local disk also in those of the folders `names` that are there.

        Each of them may be a volume of its own.

        Raises:
            DiskFaultError: a local disk is full or read-only.
            ConfigError: the storage cannot be written for any other reason.
        """
        if self.is_local:
            own = Path(self.root)
            inner = [Path(self.path(name)) for name in names] or [own]
            for folder in dict.fromkeys(path if path.is_dir() else own for path in inner):
                _check_folder(folder)
            return
        probe = self.path(f".probe-{secrets.token_hex(4)}")
        with self.explained("written"):
            self.fs.pipe_file(probe, b"starling")
            self.fs.rm_file(probe)

    def keep_only(self, name: str, parts: str) -> None:
        """Remove everything in the folder `name` but its manifest and `parts`."""
        for other in self.names(name):
            if other not in (MANIFEST, parts):
                self.fs.rm(self.path(name, other), recursive=True)

    def remove(self, name: str) -> None:
        """Remove a folder; for readers it is incomplete from the first moment on."""
        with self.explained("removed", name):
            manifest = self.path(name, MANIFEST)
            if self.fs.exists(manifest):
                self.fs.rm_file(manifest)
            self.fs.rm(self.path(name), recursive=True)

    def send(self, folder: Path, name: str, *, last: str) -> None:
        """Replace the folder `name` by the files of a local `folder`; the file `last` is copied last."""
        if self.fs.exists(self.path(name)):
            if self.fs.exists(self.path(name, last)):
                self.fs.rm_file(self.path(name, last))
            self.fs.rm(self.path(name), recursive=True)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        for file in sorted(files, key=lambda file: file.name == last):
            self.fs.put_file(str(file), self.path(name, *file.relative_to(folder).parts))

    def fetch(self, target: Path, *names: str) -> None:
        """Copy the files of a folder, at any depth, into the local folder `target`.

        Raises:
            ConfigError: the storage fails, a file would leave `target`, because a key of an object store may be any
                text, or one is a link or no regular file: what it leads to would be shared with the others.
        """
        with self.explained("read", *names):
            folder = self.path(*names)
            if self.is_local and Path(folder).is_symlink():
                raise ValueError("it is a symbolic link")
            for path in map(str, self.fs.find(folder)):
                inner = PurePosixPath(path.removeprefix(f"{folder}/"))
                if inner.is_absolute() or ".." in inner.parts or not path.startswith(f"{folder}/"):
                    raise ValueError(f"it has {path!r:.255}, which is no file in it")
                place = target / inner
                place.parent.mkdir(parents=True, exist_ok=True)
                with self.explained("read", *names, str(inner)):
                    self._fetch_file(path, place)

    def _fetch_file(self, path: str, place: Path) -> None:
        """Copy a file; on a local disk only a regular one. Raises any exception of the storage."""
        if not self.is_local:
            self.fs.get_file(path, str(place))
            return
        with os.fdopen(open_own(Path(path)), "rb") as file, place.open("wb") as copy:
            shutil.copyfileobj(file, copy, _CHUNK)

    @contextmanager
    def explained(self, done: str, *names: str) -> Iterator[None]:
        """Convert any exception of the storage's libraries to a ConfigError with the operation, `done`."""
        try:
            yield
        except StarlingError:
            raise
        except Exception as error:  # the storage is the user's, and its libraries raise anything
            reason = getattr(error, "strerror", None) or _first_line(error)
            raise ConfigError(f"{self.url(*names)} cannot be {done} ({reason}): {self._remedy(done)}") from error

    def _remedy(self, done: str) -> str:
        if not self.is_local:
            return "check policy.saving and the storage"
        if done in ("written", "copied"):
            return "free space or choose another folder"
        return "check the folder and its permissions, or choose another folder"


def _check_folder(folder: Path) -> None:
    """Check that a folder on a local disk can be written. Raises DiskFaultError or ConfigError."""
    try:
        check_writable(folder)
    except OSError as error:
        reason = error.strerror
        if error.errno == errno.EROFS:
            raise DiskFaultError(
                f"the folder of states and checkpoints {folder} cannot be written ({reason}); make its volume "
                "writable, or set policy.saving.folder to another one, and start it again"
            ) from error
        if error.errno in DISK_FAULTS:
            raise DiskFaultError(
                f"the folder of states and checkpoints {folder} cannot be written ({reason}); free some space, or set "
                "policy.saving.folder to another one, and start it again"
            ) from error
        raise ConfigError(
            f"the folder of states and checkpoints {folder} cannot be written ({reason}); let the user of the policy "
            "write there, or set policy.saving.folder to another one"
        ) from error


def open_file(fs: Any, path: str) -> Any:
    """Open a file of an fsspec file system for reading; on a local disk only a regular one.

    Raises any exception of the storage.
    """
    from fsspec.implementations.local import LocalFileSystem

    return open_regular(Path(path)) if isinstance(fs, LocalFileSystem) else fs.open(path, "rb")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Lend a temporary folder that replaces `folder` at the end, all or nothing.

    The temporary folder is next to `folder` and synced to disk before it takes the name. An existing checkpoint of that
    name stays complete until then, and is replaced in one operation where the file system can exchange two names
    (Linux), else by two renames. Leftovers of earlier crashes are removed; see `clear_leftovers`.

    Raises:
        ConfigError: the file system fails: no space, no permission, or `folder` is a file.
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
            sync_tree(temporary)
            _replace(temporary, folder)
            sync_folder(folder.parent)
        finally:
            # After success it does not exist or is the previous checkpoint; after a failure it is incomplete.
            shutil.rmtree(temporary, ignore_errors=True)
    except (OSError, SafetensorError) as error:  # safetensors raises the latter for a full disk
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(
            f"the checkpoint {folder} cannot be written ({reason}): free space or choose another folder"
        ) from error


def clear_leftovers(parent: Path, name: str | None = None) -> None:
    """Remove temporary folders of crashed writers of `parent`'s folder `name`, by default of any folder.

    No writer may be active. A folder that was renamed away by a writer that then crashed gets its name back: it may be
    the only copy.

    Raises:
        OSError: it cannot be renamed.
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
