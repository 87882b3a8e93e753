"""Import of user-defined objects named as `module:attribute` or `path/to/file.py:attribute`, and of lean libraries."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from starling.common.errors import ConfigError
from starling.common.raised import describe_raised

MAX_LISTED: Final = 10
"""Maximum number of names that the error for an unknown attribute lists."""
_running: Final = threading.RLock()
"""Held while a file runs, which may import others: a second thread waits for its end."""


@contextmanager
def without_modules(*names: str) -> Iterator[None]:
    """Let libraries that are imported inside find these top-level modules not installed.

    A library that imports an optional dependency pays for the whole import, even where its feature is unused. Modules
    that are imported already stay. No other thread may import any of `names` meanwhile.
    """
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None says: not installed
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def is_import_path(name: str) -> bool:
    """Whether `name` has the form of an import path; imports nothing."""
    place, _, attribute = name.rpartition(":")
    return bool(place and attribute)


def import_object(name: str, what: str) -> Any:
    """Import and return the object `name`.

    A file runs once per process, however many of its attributes are imported.

    Args:
        name: ``module:attribute`` or ``path/to/file.py:attribute``; the attribute may have dots.
        what: kind of the object, as the beginning of an error sentence: ``Scorer``.

    Raises:
        ConfigError: `name` is malformed, its module cannot be imported, or has no such attribute.
    """
    if not is_import_path(name):
        raise ConfigError(f"{what} {name!r}: write `module:attribute` or `path/to/file.py:attribute`.")
    place, _, attribute = name.rpartition(":")
    path = Path(place).expanduser()
    if path.suffix == ".py" and not path.is_file():
        raise ConfigError(f"{what} {name!r}: there is no file {str(path.absolute())!r}.")
    try:
        module = _module_of(path.resolve()) if path.suffix == ".py" else importlib.import_module(place)
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        reason = describe_raised(error)
        raise ConfigError(f"{what} {name!r} cannot be imported: {reason}.") from error
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
            raise ConfigError(f"{what} {name!r}: no {attribute!r} in there; {_hint(attribute, names)}.")
        found = getattr(found, part)
    return found


def _hint(attribute: str, names: list[str]) -> str:
    import difflib  # costs as much as the whole start of a small process, and only an error needs it

    close = difflib.get_close_matches(attribute, names, n=1, cutoff=0.5)
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return (
        f"did you mean {close[0]!r}" if close else f"it has {', '.join(names[:MAX_LISTED]) or 'nothing to call'}{more}"
    )


def _module_of(path: Path) -> ModuleType:
    with _running:
        return _run_file(path)


@cache
def _run_file(path: Path) -> ModuleType:
    # The module name keeps a file json.py apart from the module json, and from other files json.py.
    name = f"starling_file_{path.stem}_{zlib.crc32(bytes(path)):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    sys.path.append(
        str(path.parent)
    )  # last: it may import files of its folder, which must not shadow installed modules
    # Registered before it runs, as Python does: dataclasses look up their own module.
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:  # raised again; the next import must not find a partial module
        del sys.modules[name]
        raise
    return module
