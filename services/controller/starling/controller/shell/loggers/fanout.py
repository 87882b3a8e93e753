"""The loggers of a run: how each is created by its name, and the distribution of steps, samples and evaluations."""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from starling.common.errors import ConfigError
from starling.common.files import parse_line, read_lines
from starling.common.settings import nearest
from starling.controller.core.training.samples import TOKEN_FIELDS
from starling.controller.settings import LoggingSettings
from starling.controller.shell.loggers.custom import import_logger
from starling.controller.shell.loggers.logger import Logger, Maker, RunInfo
from starling.controller.shell.loggers.logger_thread import LogEntry, LoggerThread
from starling.controller.shell.loggers.tensorboard import TensorboardLogger
from starling.controller.shell.loggers.trackio import TrackioLogger
from starling.controller.shell.loggers.wandb import WandbLogger
from starling.controller.shell.status import is_intact

MARKS: Final = "logged"
"""Folder, in the run's folder, of a file for each logger with the last step that it took."""

_STEP: Final = b'"kind": "step"'
_KIND_WITHIN: Final = 64
"""Bytes of a line of metrics.jsonl within which its kind is: it comes second."""

_NAMED: Final[dict[str, Callable[[RunInfo, int], Logger]]] = {
    "tensorboard": TensorboardLogger,
    "wandb": WandbLogger,
    "trackio": TrackioLogger,
}


def makers(names: Iterable[str], run: RunInfo) -> dict[str, Maker]:
    """Return a constructor for each logger of a recipe.

    Raises:
        ConfigError: a name is unknown or given twice, a package is not installed, or a custom logger cannot be
            imported.
    """
    makers: dict[str, Maker] = {}
    for name in names:
        if name in makers:
            raise ConfigError(f"logging.loggers names {name!r} twice; remove one")
        makers[name] = _maker(name, run)
    return makers


@dataclass(frozen=True)
class PastSteps:
    """The steps of earlier incarnations in metrics.jsonl, as it was when this incarnation had brought it up to date."""

    path: Path
    size_bytes: int
    newest: int
    """The newest step."""
    summed_up: int = 0
    """The first so many bytes of it tell of no step after `version`."""
    version: int = 0

    def after(self, step: int) -> Iterator[LogEntry]:
        """Yield the steps after `step`, one at a time: there may be too many for the memory."""
        step = min(step, self.newest)  # a power cut may have left another number
        begin = self.summed_up if step >= self.version else 0
        if self.size_bytes <= begin:
            return
        for line in read_lines(self.path, begin):
            begin += len(line)
            if _STEP in line[:_KIND_WITHIN] and (entry := _entry_of(line)) is not None and entry.step > step:
                yield entry
            if begin >= self.size_bytes:
                return


class LoggerFanout:
    """Passes steps, evaluations and samples to every logger, and waits for them at the end of the run only."""

    def __init__(
        self, makers: Mapping[str, Maker], settings: LoggingSettings, folder: Path, past: PastSteps | None = None
    ) -> None:
        """Start every logger, with the steps of `past` that it has not taken yet."""
        self._close_s = settings.close_s
        self.threads: list[LoggerThread] = []
        if not makers:
            return
        (folder / MARKS).mkdir(exist_ok=True)
        for name, make in makers.items():
            mark = folder / MARKS / re.sub(r"[^A-Za-z0-9._-]", "-", name)
            thread = LoggerThread(name, mark, max_waiting=settings.queue_steps, deadline_s=settings.deadline_s)
            thread.begin(make, () if past is None else past.after(thread.last_step))
            self.threads.append(thread)

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Pass a note of the controller to the loggers, if it is for them."""
        match kind:
            case "step":
                self._put(LogEntry(fields["step"], step_metrics(fields)))
            case "samples":
                rows = [{k: value for k, value in row.items() if k not in TOKEN_FIELDS} for row in fields["rows"]]
                self._put(LogEntry(fields["step"], rows=rows, is_step=False))
            case "evaluation":
                metrics = {f"eval/{name}": value for name, value in _numbers(fields).items() if name != "version"}
                self._put(LogEntry(int(fields["version"]), metrics, is_step=False))

    def check(self) -> None:
        """Drop loggers that hang, and log how many entries were dropped."""
        for thread in self.threads:
            thread.check()

    def close(self) -> list[dict[str, Any]]:
        """End all loggers within one deadline. Returns the `logger` lines of those that lost entries."""
        deadline = time.monotonic() + self._close_s
        for thread in self.threads:
            thread.end()  # all at once, so that a slow logger does not shorten the time of the others
        for thread in self.threads:
            thread.close(deadline)
        return [
            {"logger": one.name, "dropped": one.num_dropped, "reason": one.problem}
            for one in self.threads
            if one.num_dropped or one.is_given_up
        ]

    def _put(self, entry: LogEntry) -> None:
        for thread in self.threads:
            thread.put(entry)


def step_metrics(fields: Mapping[str, Any]) -> dict[str, float]:
    """Return the numeric fields of a step, and ``alarm/<name>`` = 1 for each active alarm."""
    metrics = {name: value for name, value in _numbers(fields).items() if name not in ("step", "time")}
    return metrics | {f"alarm/{alarm['name']}": 1.0 for alarm in fields.get("alarms", ())}


def _entry_of(line: bytes) -> LogEntry | None:
    """Return the step of a line of metrics.jsonl; None for another kind, and for a line that a crash has damaged."""
    fields = parse_line(line) or {}
    if fields.get("kind") != "step" or not is_intact("step", fields):
        return None
    return LogEntry(fields["step"], step_metrics(fields))


def _numbers(fields: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in fields.items() if isinstance(value, int | float)}


def check_logger(name: str) -> None:
    """Raise ConfigError when no logger has this name, its package is not installed, or it cannot be imported."""
    _find_logger(name)


def _maker(name: str, run: RunInfo) -> Maker:
    return partial(_find_logger(name), run)


def _find_logger(name: str) -> Callable[[RunInfo, int], Logger]:
    if ":" in name:
        custom = import_logger(name)
        return lambda run, first_step: custom()
    logger = _NAMED.get(name)
    if logger is None:
        like = nearest(name, list(_NAMED))
        hint = f"did you mean {like}?" if like else f"choose {', '.join(_NAMED)}, or module:name for a custom one"
        raise ConfigError(f"logging.loggers names {name!r}, which is not a logger; {hint}")
    if importlib.util.find_spec(name) is None:
        raise ConfigError(
            f"logging.loggers names {name}, which is not installed; pip install 'starling-controller[{name}]', "
            "or remove it"
        )
    return logger
