"""`starling runs`: one row per run of a folder, from the ends of its files, so that long runs are listed at once."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from starling.cli.console import Console
from starling.cli.run.attempt import Attempt, attempts_in, newest_attempt
from starling.cli.run.screen import duration
from starling.cli.runs.files.curves import NUM_LAST
from starling.cli.runs.files.lines import decode, number, read_backwards, step_of, time_of
from starling.cli.runs.files.metrics import EVALUATION, REWARD
from starling.cli.runs.files.settings import settings_of
from starling.cli.runs.files.state import state_of
from starling.cli.runs.pages.page import figure_text, moment
from starling.common.errors import ConfigError
from starling.common.files import read_lines

MAX_BACK_BYTES: Final = 64 << 20
"""Bytes of metrics.jsonl, from its end, in which the last steps and the last evaluation are looked for."""
NUM_FIRST_LINES: Final = 100
"""Lines in which the time of the beginning is looked for."""
_HEAD_BYTES: Final = 80
"""Bytes of a line within which its kind is: it comes second."""
STYLES: Final = {"running": "green", "ended": "", "stopped": "yellow", "crashed": "red"}
MAX_REASON: Final = 30
PIPE_WIDTH: Final = 160
"""Columns of a table that goes to a file or another program, which no terminal limits."""


@dataclass(frozen=True)
class RunRow:
    """What `starling runs` says about a run, of its newest attempt."""

    name: str
    folder: str
    num_attempts: int
    state: str
    reason: str
    version: int | None
    """The newest step."""
    reward: float | None
    """Mean of the last steps that have one."""
    evaluation: float | None
    """Mean reward of the last evaluation."""
    started: float | None
    """Seconds since 1970."""
    duration_s: float | None
    recipe: str
    """Algorithm or kind, model and data."""


def list_runs(folder: Path, as_json: bool) -> None:
    """Print the runs in `folder`, those that began last first. Raises ConfigError when there is none."""
    rows = sorted(map(run_row, run_folders(folder)), key=lambda row: -(row.started or 0.0))
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("run", "state", "version", "reward", "held out", "started", "duration", "recipe"):
        is_number = heading in ("version", "reward", "held out", "duration")
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row))
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, PIPE_WIDTH)
    console.print(table)


def run_folders(folder: Path) -> list[Path]:
    """Return the folders of runs in `folder`, or itself where it is one. Raises ConfigError when there is none."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; give the one with the runs, such as ./runs")
    if attempts_in(folder):
        return [folder]
    try:
        found = sorted(path for path in folder.iterdir() if path.is_dir() and attempts_in(path))
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror}; give the folder with the runs") from None
    if not found:
        raise ConfigError(f"there is no run in {folder}; give the folder with the runs, such as ./runs")
    return found


def run_row(folder: Path) -> RunRow:
    """Return the row of the run in `folder`, of its newest attempt."""
    attempt = Attempt(newest_attempt(folder).absolute())
    state = state_of(attempt)
    try:
        begun, steps, evaluation, newest = _begun(attempt.metrics), *_newest(attempt.metrics)
    except ConfigError as error:
        begun, steps, evaluation, newest, state = None, [], None, None, _unreadable(state, error)
    rewards = [reward for step in steps if (reward := REWARD.read(step)) is not None]
    end = time.time() if state.name == "running" else newest
    return RunRow(
        name=folder.absolute().name,
        folder=str(folder),
        num_attempts=len(attempts_in(folder)),
        state=state.name,
        reason=state.reason,
        version=max((one for step in steps if (one := step_of(step.get("step"))) is not None), default=None),
        reward=sum(rewards) / len(rewards) if rewards else None,
        evaluation=EVALUATION.read(evaluation) if evaluation is not None else None,
        started=begun,
        duration_s=max(0.0, end - begun) if begun is not None and end is not None else None,
        recipe=recipe_text(attempt),
    )


def recipe_text(attempt: Attempt) -> str:
    """Return the recipe in a few words: the algorithm, or the kind of a run that trains nothing, model and data."""
    settings = settings_of(attempt)
    kind = settings.get("run.kind", "rl")
    what = settings.get("policy.algorithm.name", "grpo") if kind == "rl" else kind
    model = str(settings.get("model.path") or "")
    scratch = settings.get("model.scratch.pipeline") or settings.get("model.scratch.model_type")
    data = Path(str(settings.get("data.source") or "")).name
    parts = [what, Path(model).name if model else f"new {scratch}" if scratch else "", data]
    return " · ".join(str(part) for part in parts if part) if settings else ""


def _unreadable(state: Any, error: ConfigError) -> Any:
    return type(state)(state.name, state.reason or str(error))


def _begun(path: Path) -> float | None:
    """Return the time of the first line that has one."""
    for text in itertools.islice(read_lines(path), NUM_FIRST_LINES):
        line = decode(text)
        if line is not None and (found := time_of(line.get("time"))) is not None:
            return found
    return None


def _newest(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any] | None, float | None]:
    """Return the last steps, the last evaluation, and the time of the last line."""
    steps: list[dict[str, Any]] = []
    evaluation = newest = None
    for text in read_backwards(path, MAX_BACK_BYTES):
        head = text[:_HEAD_BYTES]
        is_step, is_evaluation = b'"step"' in head, b'"evaluation"' in head
        if newest is not None and not (is_step and len(steps) < NUM_LAST) and not (is_evaluation and not evaluation):
            continue
        line = decode(text)
        if line is None:
            continue
        newest = time_of(line.get("time")) if newest is None else newest
        if line.get("kind") == "step" and len(steps) < NUM_LAST and number(line.get("step")) is not None:
            steps.append(line)
        elif line.get("kind") == "evaluation" and evaluation is None:
            evaluation = line
        if len(steps) == NUM_LAST and evaluation is not None:
            break
    return steps, evaluation, newest


def _cells(row: RunRow) -> list[Text]:
    name = row.name if row.num_attempts < 2 else f"{row.name} (attempt {row.num_attempts})"
    reason = "" if row.state in ("running", "ended") else row.reason
    short = reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]} ..."
    state = Text.assemble((row.state, STYLES.get(row.state, "")), (f": {short}" if short else "", "dim"))
    numbers = (
        "" if row.version is None else str(row.version),
        figure_text(row.reward),
        figure_text(row.evaluation),
        moment(row.started)[:16],
        "" if row.duration_s is None else duration(row.duration_s),
    )
    return [Text(name), state, *map(Text, numbers), Text(row.recipe)]
