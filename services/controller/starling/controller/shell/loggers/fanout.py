"""All loggers of a run: which there are, and what each gets of what happens."""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from starling.common.errors import ConfigError
from starling.common.settings import nearest
from starling.controller.core.records import JournalEntry, StepCommitted
from starling.controller.settings import LoggingSettings
from starling.controller.shell.loggers.custom import import_logger
from starling.controller.shell.loggers.logger import Logger, Maker, RunInfo
from starling.controller.shell.loggers.logger_thread import LogEntry, LoggerThread
from starling.controller.shell.loggers.tensorboard import TensorboardLogger
from starling.controller.shell.loggers.trackio import TrackioLogger
from starling.controller.shell.loggers.wandb import WandbLogger

MARKS: Final = "logged"
"""Where in the run's folder the last step of each logger is."""

_NAMED: Final[dict[str, Callable[[RunInfo, int], Logger]]] = {
    "tensorboard": TensorboardLogger,
    "wandb": WandbLogger,
    "trackio": TrackioLogger,
}


def makers(names: Iterable[str], run: RunInfo) -> dict[str, Maker]:
    """Return how to make each logger that a recipe names.

    Raises:
        ConfigError: one sentence: a name is unknown or given twice, a package is not installed, or the user's own
            logger cannot be had.
    """
    found: dict[str, Maker] = {}
    for name in names:
        if name in found:
            raise ConfigError(f"logging.loggers names {name!r} twice; remove one")
        found[name] = _maker(name, run)
    return found


class LoggerFanout:
    """Hands steps, evaluations and samples to every logger; waits for none but at the end."""

    def __init__(
        self, makers: Mapping[str, Maker], settings: LoggingSettings, folder: Path, past: Iterable[JournalEntry] = ()
    ) -> None:
        """Begin every logger with the steps of `past`, the journal's records, that it has not taken yet."""
        self._close_s = settings.close_s
        self.outlets: list[LoggerThread] = []
        if not makers:
            return
        (folder / MARKS).mkdir(exist_ok=True)
        records = [kept.record for kept in past]
        steps = [record for record in records if isinstance(record, StepCommitted)]
        for name, make in makers.items():
            mark = folder / MARKS / re.sub(r"[^A-Za-z0-9._-]", "-", name)
            outlet = LoggerThread(name, mark, most_waiting=settings.queue_steps, deadline_s=settings.deadline_s)
            last = outlet.last_step
            missed = [LogEntry(one.step, step_metrics(one.metrics)) for one in steps if one.step > last]
            outlet.begin(make, missed)
            self.outlets.append(outlet)

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Hand over what is for loggers of what the controller notes."""
        match kind:
            case "step":
                self._put(LogEntry(fields["step"], step_metrics(fields)))
            case "samples":
                self._put(LogEntry(fields["step"], rows=fields["rows"], is_step=False))
            case "evaluation":
                metrics = {f"eval/{name}": value for name, value in _numbers(fields).items() if name != "version"}
                self._put(LogEntry(int(fields["version"]), metrics, is_step=False))

    def look(self) -> None:
        """See to loggers that hang, and tell what was dropped."""
        for outlet in self.outlets:
            outlet.look()

    def close(self) -> list[dict[str, Any]]:
        """End every logger, all within one deadline. Returns what is to be told of those that lost anything."""
        deadline = time.monotonic() + self._close_s
        for outlet in self.outlets:
            outlet.end()  # all of them at once, so that none has less time because of another
        for outlet in self.outlets:
            outlet.close(deadline)
        return [
            {"logger": one.name, "dropped": one.num_dropped, "reason": one.problem}
            for one in self.outlets
            if one.num_dropped or one.is_given_up
        ]

    def _put(self, entry: LogEntry) -> None:
        for outlet in self.outlets:
            outlet.put(entry)


def step_metrics(fields: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a step's line, and ``alarm/<name>`` = 1 for each alarm that is on."""
    metrics = {name: value for name, value in _numbers(fields).items() if name not in ("step", "time")}
    return metrics | {f"alarm/{alarm['name']}": 1.0 for alarm in fields.get("alarms", ())}


def _numbers(fields: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in fields.items() if isinstance(value, int | float)}


def _maker(name: str, run: RunInfo) -> Maker:
    if ":" in name:
        own = import_logger(name)
        return lambda _: own()
    logger = _NAMED.get(name)
    if logger is None:
        like = nearest(name, list(_NAMED))
        hint = f"did you mean {like}?" if like else f"there are {', '.join(_NAMED)}, and module:name for your own"
        raise ConfigError(f"logging.loggers names {name!r}, which is no logger; {hint}")
    if importlib.util.find_spec(name) is None:
        raise ConfigError(
            f"logging.loggers names {name}, which is not installed; pip install 'starling-controller[{name}]', "
            "or remove it"
        )
    return partial(logger, run)
