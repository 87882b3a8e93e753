"""Interface of a logger, and the description of the run that it gets. See `docs/how-to/extend/logger.md`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

Row = Mapping[str, Any]
"""One sample: JSON values by column; see `starling.controller.core.training.samples.row`."""


class Logger(Protocol):
    """Receives the metrics of a run. It is created, called and closed in one thread; its exceptions are logged."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of `step`; names with the prefix ``eval/`` are of an evaluation of that version."""

    def table(self, step: int, rows: Sequence[Row]) -> None:
        """Log sample completions of `step`."""

    def close(self) -> None:
        """Flush and close: no more entries will come."""


@dataclass(frozen=True)
class RunInfo:
    """Description of the run for loggers."""

    id: str
    """Stays the same when the controller restarts or the run is resumed."""
    name: str
    folder: Path
    """Folder of the run's files."""
    project: str = "starling"
    offline: bool = False
    """Whether a logger must not use the network."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the controller, as JSON values."""


Maker = Callable[[int], Logger]
"""Makes a logger whose next step is the given one. It gets that step and later ones again, if it had them before."""
