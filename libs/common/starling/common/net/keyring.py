"""The folder of a run's keys: keys are created, listed and revoked, also during the run.

Every file is written under a temporary name and then renamed: a running controller that reads the folder sees the old
file or the new one. `allowed.json` is written last when a key is created and first when one is revoked, so that no key
is allowed whose file is missing. Root writes them for the owner of the folder, whose user is that of the services.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import zmq

from starling.common.errors import ConfigError
from starling.common.files import write_whole
from starling.common.net.curve import ALLOWED, CONTROLLER, KeyFile, load_allowed, load_key
from starling.common.net.limits import NAME_FORM, role_of


class KeyEntry(NamedTuple):
    """One allowed key."""

    name: str
    role: str
    public: str
    path: Path | None
    """Its key file, if it is in the folder: it may have been moved to the replica's own machine."""


def make_keys(folder: Path, names: Sequence[str], *, replace: bool = False) -> None:
    """Make a key pair for each of `names` in `folder`, and the controller's if the folder has none.

    Raises ConfigError if a name is malformed, is given twice, or has a key already; with `replace` it gets a new one,
    and the old one becomes invalid.
    """
    for number, name in enumerate(names):
        if name == CONTROLLER:
            raise ConfigError(
                "the controller's key comes with the first keys of a folder; leave out the name controller"
            )
        _check_name(name)
        if name in names[:number]:
            raise ConfigError(f"{name} is given twice; give each name once")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_keys(folder, names, replace=replace)
    except OSError as error:
        raise ConfigError(f"keys cannot be written to {folder}: {error.strerror}; give another folder") from None


def _write_keys(folder: Path, names: Sequence[str], *, replace: bool) -> None:
    with _locked(folder):
        allowed = load_allowed(folder) if (folder / ALLOWED).exists() else {}
        taken = [name for name in names if name in allowed.values() or (folder / f"{name}.json").exists()]
        if taken and not replace:
            raise ConfigError(f"{folder} has a key for {taken[0]}; choose another name, or replace it with --replace")
        controller = _controller(folder, allowed)
        allowed = {public: name for public, name in allowed.items() if name not in taken}
        for name in names:
            public, secret = _pair()
            allowed[public] = name
            key = KeyFile(name=name, public=public, secret=secret, controller_public=controller.public)
            write_whole(folder / f"{name}.json", msgspec.json.encode(key), private=True, owner_of=folder)
        write_whole(folder / ALLOWED, msgspec.json.encode(allowed), private=True, owner_of=folder)


def list_keys(folder: Path) -> list[KeyEntry]:
    """Return the allowed keys, by role and number. Raises ConfigError if `folder` has no allow-list."""
    entries = []
    for public, name in load_allowed(folder).items():
        path = folder / f"{name}.json"
        entries.append(KeyEntry(name, role_of(name) or "unknown", public, path if path.exists() else None))
    return sorted(entries, key=lambda entry: (entry.role, len(entry.name), entry.name))


def revoke_keys(folder: Path, names: Sequence[str]) -> None:
    """Revoke the keys of `names`, and delete their key files.

    Raises ConfigError, and revokes nothing, if one of them has no key.
    """
    if not folder.is_dir():
        raise ConfigError(f"the folder {folder} does not exist; give the folder of a run's keys")
    try:
        _revoke(folder, names)
    except OSError as error:
        raise ConfigError(f"the keys in {folder} cannot be changed: {error.strerror}") from None


def _revoke(folder: Path, names: Sequence[str]) -> None:
    with _locked(folder):
        allowed = load_allowed(folder)
        known = sorted(set(allowed.values()))
        for name in names:
            if name not in known:
                raise ConfigError(f"{folder} allows no key of {name}; it allows {', '.join(known) or 'no key'}")
        allowed = {public: name for public, name in allowed.items() if name not in names}
        write_whole(folder / ALLOWED, msgspec.json.encode(allowed), private=True, owner_of=folder)
        for name in names:
            (folder / f"{name}.json").unlink(missing_ok=True)


def _check_name(name: str) -> None:
    if role_of(name) is None:
        raise ConfigError(f"{name!r} is not a valid name for a key; write {NAME_FORM}, for example rollout-3")


def _controller(folder: Path, allowed: dict[str, str]) -> KeyFile:
    """Return the controller's keys: the present ones, or new ones in a folder without keys."""
    path = folder / f"{CONTROLLER}.json"
    if path.exists():
        return load_key(path)
    if allowed:
        raise ConfigError(f"{path} is missing, and the keys in {folder} depend on it; put it back, or make new keys")
    public, secret = _pair()
    key = KeyFile(name=CONTROLLER, public=public, secret=secret, controller_public=public)
    write_whole(path, msgspec.json.encode(key), private=True, owner_of=folder)
    return key


def _pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode("ascii"), secret.decode("ascii")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`. Raises ConfigError if another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another `starling keys` is using {folder}; try again when it is done") from None
        yield
    finally:
        os.close(descriptor)
