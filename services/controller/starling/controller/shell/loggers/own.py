"""The user's own loggers: `module:name` or `path/to/file.py:name`, a function or a class."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from starling.common.errors import ConfigError
from starling.common.settings import nearest
from starling.controller.shell.loggers.logger import Row


class OwnLogger:
    """Calls what the user wrote; `table` and `close` need not be there."""

    def __init__(self, target: Any) -> None:
        """`target`: an object with `log`, or a function of step and metrics."""
        self._log: Callable[[int, Mapping[str, float]], None] = getattr(target, "log", target)
        self._table: Callable[[int, Sequence[Row]], None] | None = getattr(target, "table", None)
        self._close: Callable[[], None] | None = getattr(target, "close", None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand over the metrics."""
        self._log(step, metrics)

    def table(self, step: int, rows: Sequence[Row]) -> None:
        """Hand over the samples."""
        if self._table is not None:
            self._table(step, rows)

    def close(self) -> None:
        """Say that nothing more will come."""
        if self._close is not None:
            self._close()


def import_logger(name: str) -> Callable[[], OwnLogger]:
    """Import what `name` names; the logger itself is made when what is returned is called.

    Raises:
        ConfigError: one sentence: it cannot be imported, is not there, or can log nothing.
    """
    place, _, attribute = name.rpartition(":")
    path = Path(place).expanduser()
    if path.suffix == ".py" and not path.is_file():
        raise ConfigError(f"the logger {name!r} cannot be had: there is no file {str(path.absolute())!r}")
    try:
        module = _load_file(path) if path.suffix == ".py" else importlib.import_module(place)
    except Exception as error:  # a user's module may raise anything while it is imported
        raise ConfigError(f"the logger {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    target = getattr(module, attribute, None)
    if target is None:
        like = nearest(attribute, [key for key in vars(module) if not key.startswith("_")])
        hint = f"did you mean {like}?" if like else "name a function or a class that is in it"
        raise ConfigError(f"the logger {name!r} cannot be had: there is no {attribute!r} in there; {hint}")
    if isinstance(target, type) and callable(getattr(target, "log", None)):
        return lambda: OwnLogger(target())
    if callable(getattr(target, "log", target)) and not isinstance(target, type):
        return lambda: OwnLogger(target)
    raise ConfigError(
        f"the logger {name!r} cannot log: give a function of step and metrics, or a class or an object with `log`"
    )


def _load_file(path: Path) -> ModuleType:
    # The name keeps a file json.py from taking the place of the module json.
    spec = importlib.util.spec_from_file_location(f"starling_logger_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    sys.path.append(str(path.absolute().parent))  # the files beside it may be imported by it
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
