"""What a user names: `module:attribute`, or `path/to/file.py:attribute`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import zlib
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from starling.common.errors import ConfigError

TOLD: Final = 10
"""Names that the error of a wrong one lists."""
_running: Final = threading.RLock()
"""Held while a file runs, which may name others: a second thread that wants it waits for its end."""


def is_import_path(name: str) -> bool:
    """Say whether `name` has the form of something to import; imports nothing."""
    place, _, attribute = name.rpartition(":")
    return bool(place and attribute)


def import_object(name: str, what: str) -> Any:
    """Import what `name` names, and return it.

    A file runs once per process, however many of its attributes are named.

    Args:
        name: ``module:attribute`` or ``path/to/file.py:attribute``; the attribute may have dots.
        what: what it is to be, as the beginning of a sentence: ``Scorer``.

    Raises:
        ConfigError: `name` has another form, its module cannot be imported, or has no such attribute.
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
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(f"{what} {name!r} cannot be imported: {said}.") from error
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
            raise ConfigError(f"{what} {name!r}: no {attribute!r} in there; {_hint(attribute, names)}.")
        found = getattr(found, part)
    return found


def _hint(attribute: str, names: list[str]) -> str:
    import difflib  # costs as much as the whole start of a small process, and only a mistake needs it

    close = difflib.get_close_matches(attribute, names, n=1, cutoff=0.5)
    more = f" and {len(names) - TOLD} more" if len(names) > TOLD else ""
    return f"did you mean {close[0]!r}" if close else f"it has {', '.join(names[:TOLD]) or 'nothing to call'}{more}"


def _module_of(path: Path) -> ModuleType:
    with _running:
        return _run_file(path)


@cache
def _run_file(path: Path) -> ModuleType:
    # The name keeps a file json.py from taking the place of the module json, and two files of one name apart.
    name = f"starling_file_{path.stem}_{zlib.crc32(bytes(path)):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    sys.path.append(str(path.parent))  # last: the files beside it may be imported by it, and hide nothing
    # Known before it runs, as every module is: dataclasses look their own module up.
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:  # whatever it raised is raised again; half a module must not be found the next time
        del sys.modules[name]
        raise
    return module
