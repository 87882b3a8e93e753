"""View of the file system inside a sandbox: the interpreter, installed packages, the code to run, and what is declared.

A folder that holds user code is not shown as it is, since it may also hold the run's folder with its keys: of the
working folder, of the folders of named files and of other places where Python finds modules, only modules and packages
are visible, and within a package no folder of a run and no key file. Data must be declared (`SandboxNeeds.paths`).
"""

from __future__ import annotations

import math
import os
import stat
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple

from starling.common.errors import ConfigError
from starling.common.sandbox.interpreter import Interpreter
from starling.common.sandbox.settings import SandboxNeeds
from starling.common.settings import environment_variables

SYSTEM: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store")
_ETC: Final = (
    "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "timezone", "nsswitch.conf", "passwd",
    "group", "mime.types", "protocols", "services", "os-release", "fonts", "ssl/certs", "ssl/openssl.cnf",
    "pki/tls/certs", "ca-certificates", "OpenCL", "vulkan",
)  # fmt: skip
_ETC_NETWORK: Final = ("resolv.conf", "hosts", "host.conf", "gai.conf")
_DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty")
_LINKS: Final = (("/proc/self/fd", "fd"), ("fd/0", "stdin"), ("fd/1", "stdout"), ("fd/2", "stderr"))
_SUFFIXES: Final = (".py", ".pyc", ".so", ".pyd", ".pyi", ".typed")
_OF_RUNS: Final = frozenset(("journal.sqlite", "allowed.json"))
"""Files of the folder of a run, and of that of its keys."""
_KEY_FIELDS: Final = ((b'"secret"', b'"controller_public"'), (b'"base_url"', b'"api_key"'))
"""Fields of a key file (`starling.common.net.curve.KeyFile`), and of the file with the HTTP key of a rollout."""
_KEY_BYTES: Final = 4096
"""Limit on the size of a key file; one has 250 bytes."""
REUSED_S: Final = 10.0
"""How long what was found in a package is used again."""
TMP_BYTES: Final = 1 << 30

Kind = Literal["read_only", "writable", "device", "tmpfs", "link", "proc"]


class Entry(NamedTuple):
    """One entry of the view, in the order in which it is made."""

    kind: Kind
    source: str
    """Path to show, or the target of a link; empty for a new file system."""
    target: str


@dataclass(slots=True)
class View:
    """What a sandbox shows."""

    folder: str
    """The working folder inside."""
    entries: list[Entry] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    """Folders of code, which Python lists."""
    prefixes: tuple[str, ...] = ()
    """Folders of the interpreter and of its packages."""
    _shown: set[str] = field(default_factory=set)

    def readable(self) -> list[str]:
        """Return the paths outside that may be read."""
        return [entry.source for entry in self.entries if entry.kind == "read_only"]

    def writable(self) -> list[str]:
        """Return the paths outside that may be read and written."""
        return [entry.source for entry in self.entries if entry.kind in ("writable", "device")]

    def show(self, path: str, kind: Kind = "read_only") -> None:
        """Show a file or folder at its own path and, where that goes through symbolic links, at its real one."""
        for place in dict.fromkeys((os.path.realpath(path), os.path.abspath(path))):
            if place not in self._shown and os.path.exists(place) and not (kind == "read_only" and self._covers(place)):
                self._shown.add(place)
                self.entries.append(Entry(kind, os.path.realpath(place), place))

    def shows(self, path: str) -> bool:
        """Return whether a folder is below one that is shown already, at its own path and at its real one."""
        return self._covers(os.path.realpath(path)) and self._covers(os.path.abspath(path))

    def add(self, kind: Kind, source: str, target: str) -> None:
        """Add an entry that is not a path of the machine."""
        self.entries.append(Entry(kind, source, target))

    def _covers(self, place: str) -> bool:
        return any(str(parent) in self._shown for parent in Path(place).parents)


def view_of(needs: SandboxNeeds, names: Iterable[str], interpreter: Interpreter | None = None) -> View:
    """Return the view for code that imports `names`, each ``module:attribute`` or ``path/to/file.py:attribute``.

    Args:
        needs: what it declares.
        names: what it imports.
        interpreter: which runs it; None for that of this process, with the places where this one finds modules.

    Raises:
        ConfigError: a declared path or device does not exist.
    """
    folder = os.getcwd()
    own = (sys.base_prefix, sys.base_exec_prefix, sys.prefix, sys.exec_prefix)
    view = View(folder, prefixes=tuple(dict.fromkeys(interpreter.prefixes if interpreter else own)))
    _add_system(view, network=needs.network)
    _add_devices(view, needs.device_files())
    view.add("proc", "", "/proc")
    view.add("tmpfs", "", "/tmp")  # before what follows, which may be below it
    for prefix in (*view.prefixes, *(interpreter.links if interpreter else ())):
        view.show(prefix)
    files = (Path(name.rpartition(":")[0]).expanduser() for name in names)
    folders = [str(file.resolve().parent) for file in files if file.suffix == ".py"]
    found_by_service = [] if interpreter else [place for place in sys.path if place]
    for place in dict.fromkeys([*found_by_service, *folders, folder]):
        _add_code(view, place)
    for place in environment_variables(["LD_LIBRARY_PATH"]).get("LD_LIBRARY_PATH", "").split(os.pathsep):
        if os.path.isabs(place):  # some interpreters do not start without
            view.show(place)
    for path in needs.paths:
        _declared(path, "paths")
        view.show(str(path))
    for path in needs.writable_paths:
        _declared(path, "writable_paths")
        view.show(str(path), "writable")
    return view


def _add_system(view: View, *, network: bool) -> None:
    for place in SYSTEM:
        if os.path.islink(place):
            view.add("link", os.readlink(place), place)
        else:
            view.show(place)
    view.add("tmpfs", "", "/etc")
    for name in (*_ETC, *(_ETC_NETWORK if network else ())):
        if os.path.exists(f"/etc/{name}"):
            view.add("read_only", os.path.realpath(f"/etc/{name}"), f"/etc/{name}")


def _add_devices(view: View, declared: Sequence[str]) -> None:
    view.add("tmpfs", "", "/dev")
    for name in _DEVICES:
        if os.path.exists(f"/dev/{name}"):
            view.add("device", f"/dev/{name}", f"/dev/{name}")
    for target, name in _LINKS:
        view.add("link", target, f"/dev/{name}")
    view.add("tmpfs", "", "/dev/shm")
    for device in declared:
        if not os.path.exists(device):
            raise ConfigError(f"devices has {device!r}, which does not exist on this machine.")
        view.show(device, "device")
    if declared:
        view.show("/sys")


def _add_code(view: View, place: str) -> None:
    """Show the modules and packages in a folder, or an archive of modules."""
    if not os.path.isdir(place):
        view.show(place)
        return
    view.folders.append(place)
    if view.shows(place):  # as the installed packages are: looking through them takes longer than all the rest
        return
    with os.scandir(place) as found:
        for entry in sorted(found, key=lambda entry: entry.name):
            if os.path.isdir(entry.path) and _is_package(entry.path, entry.name):
                _show_without(view, entry.path, _of_runs(entry.path), os.path.realpath(entry.path))
            elif os.path.isfile(entry.path) and entry.name.endswith(_SUFFIXES):
                view.show(entry.path)


_looked_through: Final[dict[str, tuple[float, set[str]]]] = {}
"""When a package was looked through, and what is hidden of it, by path."""


def _of_runs(path: str) -> set[str]:
    """Return the folders of runs and of keys in a package, and single key files, where a recipe or a user has put them.

    A replica on another machine needs its own key only, so that file may be anywhere. What was found is used again for
    some seconds: a service that starts makes several views, and a package may have tens of thousands of files.
    """
    looked, hidden = _looked_through.get(path, (-math.inf, set[str]()))
    if time.monotonic() - looked > REUSED_S:
        hidden = _look_through(path)
        _looked_through[path] = time.monotonic(), hidden
    return hidden


def _look_through(path: str) -> set[str]:
    hidden = set()
    for folder, _, names in os.walk(os.path.realpath(path)):
        if not _OF_RUNS.isdisjoint(names):
            hidden.add(folder)
        else:
            hidden.update(file for file in (os.path.join(folder, name) for name in names) if _is_key(file))
    return hidden


def _is_key(path: str) -> bool:
    """Return whether a file is a key as `starling keys` or a rollout's HTTP server writes it, with mode 0600."""
    try:
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or not 0 < found.st_size <= _KEY_BYTES:
            return False
        with open(path, "rb") as file:
            content = file.read(_KEY_BYTES)
    except OSError:  # the code inside cannot read it either, or it has gone
        return False
    return any(all(name in content for name in names) for names in _KEY_FIELDS)


def _show_without(view: View, path: str, hidden: set[str], package: str) -> None:
    """Show a folder without the folders and files in `hidden`, which are no links, or a file.

    A link leads nowhere inside when it leads out of the package, as in one that is shown as a whole.
    """
    real = os.path.realpath(path)
    if not f"{real}{os.sep}".startswith(f"{package}{os.sep}"):
        return
    if not any(f"{folder}{os.sep}".startswith(f"{real}{os.sep}") for folder in hidden):
        if not any(f"{real}{os.sep}".startswith(f"{folder}{os.sep}") for folder in hidden):  # a link into one
            view.show(path)
        return
    if real in hidden or os.path.islink(path):
        return
    with os.scandir(path) as found:
        for entry in sorted(found, key=lambda entry: entry.name):
            _show_without(view, entry.path, hidden, package)


def _is_package(path: str, name: str) -> bool:
    """Return whether a folder holds modules: itself, or as a namespace package of packages."""
    if name.endswith((".dist-info", ".egg-info")):
        return True
    if not name.isidentifier():
        return False
    try:
        names = os.listdir(path)
        return any(name.endswith((".py", ".so")) for name in names) or any(
            os.path.exists(os.path.join(path, name, "__init__.py")) for name in names
        )
    except OSError:
        return False


def _declared(path: Path, what: str) -> None:
    if not path.exists():
        raise ConfigError(f"{what} has {str(path)!r}, which does not exist on this machine.")
