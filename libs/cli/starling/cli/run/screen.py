"""Display of a run: one live screen on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self, get_args

from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from starling.cli.console import Console
from starling.cli.recipe.schema import Recipe
from starling.common.ids import Activity, Objective
from starling.common.kinds import TRAINED_PHASES
from starling.common.observe.terminal import one_line
from starling.common.wire.telemetry import RunSnapshot

BARS = "▁▂▃▄▅▆▇█"
SHOWN_NOTICES = 4


class Screen(Protocol):
    """Display of a run."""

    def __enter__(self) -> Self:
        """Begin to show."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End."""

    def show(self, snapshot: RunSnapshot) -> None:
        """Show the state of the run."""

    def line(self, name: str, text: str) -> None:
        """Take one line of a process's log; called from other threads."""

    def say(self, text: str) -> None:
        """Show a notice of the supervisor."""


def make_screen(kind: Literal["auto", "live", "plain"], recipe: Recipe, folder: Path) -> Screen:
    """Return the screen to use."""
    live = kind == "live" or (kind == "auto" and sys.stdout.isatty())
    return LiveScreen(recipe, folder) if live else PlainScreen(recipe)


class PlainScreen:
    """Plain lines: a summary after every twentieth of the steps, and the services' logs behind their names."""

    def __init__(self, recipe: Recipe) -> None:
        """Show about twenty lines for each phase."""
        self._next_step = 0
        self._every = {
            recipe.kind.objective: max(1, recipe.examples.num_steps // 5),
            **dict.fromkeys(TRAINED_PHASES, max(1, recipe.rl.num_steps // 20)),
        }
        self._phase = ""
        self._num_evaluations = 0
        self._next_answer = 1
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def show(self, snapshot: RunSnapshot) -> None:
        """Print a line when enough steps or prompts were added since the last."""
        if snapshot.phase != self._phase:
            self._phase, self._next_step = snapshot.phase, 0
        num_evaluations = max(snapshot.num_evaluations, len(snapshot.evaluations))
        num_new = min(num_evaluations - self._num_evaluations, len(snapshot.evaluations))
        for summary in snapshot.evaluations[len(snapshot.evaluations) - num_new :]:
            self._print(f"evaluation of version {summary['version']:.0f}: {evaluation_text(summary)}")
        self._num_evaluations = num_evaluations
        if snapshot.num_prompts and snapshot.num_answered >= self._next_answer:
            self._next_answer = min(snapshot.num_prompts, snapshot.num_answered + max(1, snapshot.num_prompts // 20))
            self._next_answer += snapshot.num_answered == snapshot.num_prompts
            self._print(answered_text(snapshot))
        if snapshot.step and snapshot.version >= self._next_step and snapshot.phase in self._every:
            self._next_step = snapshot.version + self._every[snapshot.phase]
            self._print(step_text(snapshot))

    def line(self, name: str, text: str) -> None:
        """Print a log line behind its process's name."""
        self._print(f"{name:<11}| {text}")

    def say(self, text: str) -> None:
        """Print a notice."""
        self._print(f"starling   | {text}")

    def _print(self, text: str) -> None:
        with self._lock:
            try:
                print(text, flush=True)
            except BrokenPipeError:
                # The reader of stdout has exited. The run continues, and its log files have every line.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            except OSError:
                pass  # stdout is a file on a full disk: the thread that prints must go on reading its process's pipe


class LiveScreen:
    """One screen that is redrawn: roles and versions, progress, reward, staleness, tokens/s, time left."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        """Show the run of `recipe`, whose files are in `folder`."""
        self._recipe, self._folder = recipe, folder
        self._notices: deque[str] = deque(maxlen=SHOWN_NOTICES)
        self._pace = Pace()
        self._live = Live(Text("starting ..."), console=Console(), refresh_per_second=4, transient=False)
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, snapshot: RunSnapshot) -> None:
        """Redraw."""
        self._live.update(self._draw(snapshot))

    def line(self, name: str, text: str) -> None:
        """Keep warnings and errors as notices; the rest is in the log files."""
        if "[warning" in text or "[error" in text or text.startswith("starling "):
            self.say(f"{name}: {text}")

    def say(self, text: str) -> None:
        """Show a notice below the tables."""
        with self._lock:
            self._notices.append(text)

    def _draw(self, snapshot: RunSnapshot) -> RenderableType:
        with self._lock:
            notices = [Text(notice, style="yellow", overflow="ellipsis", no_wrap=True) for notice in self._notices]
        title = Text(f"starling · {self._recipe.run.name} · {snapshot.phase}")
        parts: list[RenderableType] = [self._progress(snapshot), self._figures(snapshot)]
        if snapshot.replicas:
            parts += [_replicas(snapshot), Text(f"now: {snapshot.waiting_for}", style="dim")]
        return Panel(Group(*parts, *notices), title=title, subtitle=Text(short_path(self._folder)), border_style="cyan")

    def _progress(self, snapshot: RunSnapshot) -> RenderableType:
        left_s = self._pace.left_s(snapshot)
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(width=18)
        row.add_column(ratio=1)
        row.add_column(justify="right", width=30)
        left = "" if left_s is None else f"about {duration(left_s)} left"
        what, done, goal = "step", snapshot.version, snapshot.last_step
        if snapshot.num_prompts:
            what, done, goal = "prompt", snapshot.num_answered, snapshot.num_prompts
        row.add_row(
            f"{what} {done} of {goal}",
            ProgressBar(total=max(1, goal), completed=done),
            f"{duration(snapshot.elapsed_s)}  {left}",
        )
        return row

    def _figures(self, snapshot: RunSnapshot) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        if snapshot.rewards:
            trend = sparkline(snapshot.curve or snapshot.rewards)
            table.add_row("reward", Text.assemble(f"{recent_mean(snapshot.rewards):.3f}  ", (trend, "green")))
        elif snapshot.step.get("loss") is not None:
            table.add_row("loss", f"{snapshot.step['loss']:.4f}")
        if snapshot.step.get("staleness_max") is not None and snapshot.step.get("staleness_mean") is not None:
            allowed = "" if self._recipe.kind.reads_trajectories else f" of {self._recipe.rl.max_staleness} allowed"
            mean, most = snapshot.step["staleness_mean"], snapshot.step["staleness_max"]
            table.add_row("staleness", f"mean {mean:.2f}, most {most:.0f}{allowed}")
        for alarm in snapshot.alarms:
            table.add_row("alarm", Text(alarm, style="red"))
        for notice in snapshot.notices:
            table.add_row("fault", Text(notice, style="yellow"))
        if snapshot.step.get("filtered_share") is not None:
            table.add_row("filtered", f"{snapshot.step['filtered_share']:.0%} of the groups, for equal rewards")
        for summary in snapshot.evaluations:
            table.add_row("held out", f"version {summary['version']:.0f}: {evaluation_text(summary)}")
        return table


class Pace:
    """Estimate of the remaining time from the pace of the current phase."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._phase = ""
        self._from: tuple[float, int] = (0.0, 0)

    def left_s(self, snapshot: RunSnapshot) -> float | None:
        """Return the seconds to the end of the current phase, None while unknown."""
        now = time.monotonic()
        at = snapshot.num_answered if snapshot.num_prompts else snapshot.version
        if snapshot.phase != self._phase:
            self._phase, self._from = snapshot.phase, (now, at)
        goal = snapshot.num_prompts or snapshot.last_step
        if snapshot.phase in get_args(Objective):
            goal = snapshot.num_supervised_steps
        since, first = self._from
        done = at - first
        if snapshot.phase not in (*get_args(Objective), *get_args(Activity)) or done < 2:
            return None
        return (now - since) / done * max(0, goal - at)


def _replicas(snapshot: RunSnapshot) -> RenderableType:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for heading in ("replica", "version", "work", "tokens/s", "pulls"):
        table.add_column(heading, justify="left" if heading in ("replica", "pulls") else "right")
    for replica in snapshot.replicas:
        speed = replica.gauges.get("tokens_per_s")
        version = str(replica.version) if replica.role in ("policy", "rollout") else ""
        pull = "" if replica.progress is None else f"version {replica.pulling}: {replica.progress}"
        table.add_row(replica.name, version, str(replica.num_leases), f"{speed:,.0f}" if speed else "", pull)
    return table


def step_text(snapshot: RunSnapshot) -> str:
    """Return one line on the last step."""
    step = snapshot.step
    speed = sum(r.gauges.get("tokens_per_s", 0.0) for r in snapshot.replicas if r.role == "rollout")
    parts = [f"step {snapshot.version} of {snapshot.last_step}", f"{duration(snapshot.elapsed_s)}"]
    if snapshot.rewards and snapshot.phase in TRAINED_PHASES:
        parts.append(f"reward {recent_mean(snapshot.rewards):.3f}")
        parts.append(f"staleness {step.get('staleness_max') or 0:.0f}")
        parts.append(f"{speed:,.0f} tokens/s")
    elif step.get("loss") is not None:
        parts.append(f"loss {step['loss']:.4f}")
    return "  ".join(parts)


def answered_text(snapshot: RunSnapshot) -> str:
    """Return one line on how many prompts are answered."""
    speed = sum(r.gauges.get("tokens_per_s", 0.0) for r in snapshot.replicas if r.role == "rollout")
    parts = [f"prompt {snapshot.num_answered} of {snapshot.num_prompts}", duration(snapshot.elapsed_s)]
    parts += [f"reward {recent_mean(snapshot.rewards):.3f}"] if snapshot.rewards else []
    return "  ".join([*parts, f"{speed:,.0f} tokens/s"])


def evaluation_text(summary: dict[str, float | str | None]) -> str:
    """Return the figures of an evaluation."""
    figures = {name: value for name, value in summary.items() if isinstance(value, int | float)}
    prefixes = {"score/": "", "eval_score/": "evaluation score "}
    scores = [
        f"{what}{one_line(name.removeprefix(prefix))} {value:.3f}"
        for prefix, what in prefixes.items()
        for name, value in figures.items()
        if name.startswith(prefix)
    ]
    reward = f"reward {figures['reward_mean']:.3f}" if "reward_mean" in figures else "no reward"
    return f"{reward} on {figures.get('num_prompts', 0):.0f} prompts" + (f" ({', '.join(scores)})" if scores else "")


def recent_mean(values: tuple[float, ...], window: int = 5) -> float:
    """Return the mean of the last values: single steps are noisy."""
    last = values[-window:]
    return sum(last) / len(last)


def sparkline(values: tuple[float, ...], width: int = 60) -> str:
    """Return a curve of block characters, at most `width` wide; several values share a column."""
    size = max(1, -(-len(values) // width))
    columns = [values[i : i + size] for i in range(0, len(values), size)]
    means = [mean for column in columns if math.isfinite(mean := sum(column) / len(column))]
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if 0 < high - low < math.inf else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def short_path(path: Path) -> str:
    """Return `path` relative to the current folder, if it is below it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def duration(seconds: float) -> str:
    """Return ``1:05`` or ``2:03:04``."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
