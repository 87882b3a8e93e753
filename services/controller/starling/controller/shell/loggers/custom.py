"""The user's own loggers: `module:name` or `path/to/file.py:name`, a function or a class."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starling.common.errors import ConfigError
from starling.common.importing import import_object
from starling.controller.shell.loggers.logger import Row


class CustomLogger:
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


def import_logger(name: str) -> Callable[[], CustomLogger]:
    """Import what `name` names; the logger itself is made when what is returned is called.

    Raises:
        ConfigError: one sentence: it cannot be imported, is not there, or can log nothing.
    """
    target = import_object(name, "the logger")
    if isinstance(target, type) and callable(getattr(target, "log", None)):
        return lambda: CustomLogger(target())
    if callable(getattr(target, "log", target)) and not isinstance(target, type):
        return lambda: CustomLogger(target)
    raise ConfigError(
        f"the logger {name!r} cannot log: give a function of step and metrics, or a class or an object with `log`"
    )
