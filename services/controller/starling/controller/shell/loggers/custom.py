"""Custom loggers, `module:name` or `path/to/file.py:name`: a function, a class or an object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starling.common.errors import ConfigError
from starling.common.importing import import_object
from starling.controller.shell.loggers.logger import Row


class CustomLogger:
    """Adapter of a user's function or object, whose `table` and `close` are optional."""

    def __init__(self, target: Any) -> None:
        """`target` is an object with `log`, or a function of step and metrics."""
        self._log: Callable[[int, Mapping[str, float]], None] = getattr(target, "log", target)
        self._table: Callable[[int, Sequence[Row]], None] | None = getattr(target, "table", None)
        self._close: Callable[[], None] | None = getattr(target, "close", None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass on the metrics."""
        self._log(step, metrics)

    def table(self, step: int, rows: Sequence[Row]) -> None:
        """Pass on the samples."""
        if self._table is not None:
            self._table(step, rows)

    def close(self) -> None:
        """Close the target."""
        if self._close is not None:
            self._close()


def import_logger(name: str) -> Callable[[], CustomLogger]:
    """Import a custom logger; the returned function creates it.

    Raises:
        ConfigError: it cannot be imported, does not exist, or is not a logger.
    """
    target = import_object(name, "the logger")
    if isinstance(target, type) and callable(getattr(target, "log", None)):
        return lambda: CustomLogger(target())
    if callable(getattr(target, "log", target)) and not isinstance(target, type):
        return lambda: CustomLogger(target)
    raise ConfigError(
        f"{name!r} is not a logger: give a function of step and metrics, or a class or an object with `log`"
    )
