"""What a logger is, and what it is told of the run. See `docs/how-to/extend/logger.md` for how to write one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

Row = Mapping[str, Any]
"""One sample: JSON values by column; see `starling.controller.core.training.samples.row`."""


class Logger(Protocol):
    """Takes what a run measures. It is made, called and closed in one thread; what it raises is told and dropped."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of `step`, or with ``eval/`` before their names those of an evaluation of that version."""

    def table(self, step: int, rows: Sequence[Row]) -> None:
        """Take sample completions of `step`."""

    def close(self) -> None:
        """Write out what is held back: nothing more will come."""


@dataclass(frozen=True)
class RunInfo:
    """What loggers know of the run."""

    id: str
    """The same after a restart, and when the run is taken up again."""
    name: str
    folder: Path
    """Where the run's files are."""
    project: str = "starling"
    offline: bool = False
    """Nothing may go over the network now."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The controller's, as JSON values."""


Maker = Callable[[int], Logger]
"""Makes a logger whose first new step is the given one; whatever it has of that step or later ones, it gets again."""
