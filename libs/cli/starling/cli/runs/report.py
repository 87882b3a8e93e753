"""`starling report`: everything that the folder of a run says, as one HTML file."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from starling.cli.report.statistics import Sample
from starling.cli.run.attempt import Attempt
from starling.cli.run.screen import duration, short_path
from starling.cli.runs.files.events import Events, FirstAndLast, event_text
from starling.cli.runs.files.history import History, read_history
from starling.cli.runs.files.lines import number, read_objects, text_of
from starling.cli.runs.files.metrics import ENTROPY, EVALUATION, REWARD, STALENESS, STEP_TIME, THROUGHPUT, named
from starling.cli.runs.files.settings import changed_settings
from starling.cli.runs.files.state import RunState, state_of
from starling.cli.runs.listing import recipe_text
from starling.cli.runs.pages.figures import run_plots
from starling.cli.runs.pages.page import document, element, escape, figure_text, moment, section, table, write_page
from starling.common.counts import counted
from starling.controller.shell.outputs.samples import OLD_SAMPLES, SAMPLES

NUM_FIRST_SAMPLES: Final = 4
NUM_LAST_SAMPLES: Final = 12
SAMPLE_FIGURES: Final = ("reward", "status", "num_tokens", "num_turns", "oldest_version", "newest_version")
MAX_LARGE: Final = 12
"""Characters of a figure in large type."""
MAX_SCORES: Final = 16
"""Scores of an evaluation, or of a sample, that are shown."""
Rows = list[Sequence[object]]


def write_report(folder: Path, out: Path | None, say: Callable[[str], None]) -> None:
    """Write the report of the run in `folder` to `out`, by default into the folder. Raises ConfigError."""
    history = read_history(folder)
    path = out if out is not None else history.newest.folder / "report.html"
    write_page(path, page(history))
    say(f"report: {short_path(path.absolute())} ({path.stat().st_size / 1e6:.1f} MB)")


def page(history: History) -> str:
    """Return the report as HTML."""
    events = history.events
    sections = [
        ("Curves", "curves", run_plots(history)),
        ("Evaluations", "evaluations", _evaluations(events)),
        ("Steps", "steps", _steps(history)),
        ("Replicas", "replicas", _replicas(events)),
        ("Weight publications", "weights", _publications(events)),
        ("Failures of rewards and groups", "failures", _failures(events)),
        ("Events and operators", "events", _events(events)),
        ("Sample completions", "samples", _samples(history.newest)),
        ("Settings that are no defaults", "settings", _settings(history.newest)),
    ]
    shown = [(title, anchor, body) for title, anchor, body in sections if body]
    links = " ".join(f'<a href="#{anchor}">{escape(title)}</a>' for title, anchor, _ in shown)
    state = state_of(history.newest)
    body = _header(history, state) + f"<nav>{links}</nav>" + "".join(section(t, b, a) for t, a, b in shown)
    return document(f"{history.name}: report", body)


def _header(history: History, state: RunState) -> str:
    reward, evaluation = history.curves.get(REWARD), history.curves.get(EVALUATION)
    speed = history.curves.get(THROUGHPUT)
    figures = [
        ("version reached", str(history.newest_step) if history.newest_step >= 0 else "none"),
        ("reward, last 5 steps", figure_text(reward.by_step.last()) if reward else ""),
        ("last evaluation", figure_text(evaluation.by_step.newest()) if evaluation else ""),
        ("tokens/s, last 5 steps", figure_text(speed.by_step.last()) if speed else ""),
        ("duration", duration(history.seconds.end)),
        ("started", moment(history.begun)[:16]),
        ("attempts", str(len(history.attempts)) if len(history.attempts) > 1 else ""),
    ]
    boxes = "".join(_box(label, value) for label, value in figures if value)
    reason = element("span", f" {state.reason}", "dim small") if state.reason else ""
    return (
        f"<header>{element('h1', history.name)}"
        f"{element('p', recipe_text(history.newest), 'dim')}"
        f"<p>{element('span', state.name, f'state {state.name}')}{reason}</p>"
        f'<div class="figures">{boxes}</div></header>'
    )


def _box(label: str, value: str) -> str:
    shown = element("b", value, "long" if len(value) > MAX_LARGE else "")
    return f'<div class="figure">{shown}{element("span", label)}</div>'


def _steps(history: History) -> str:
    columns = ("step", "time", "phase", "reward", "loss", "entropy", "staleness", "step time (s)", "tokens/s")
    readers = (REWARD.read, named("loss"), ENTROPY.read, STALENESS.read, STEP_TIME.read, THROUGHPUT.read)
    rows: Rows = [
        (
            line["step"],
            moment(number(line.get("time"))),
            text_of(line, "phase", 40),
            *(figure_text(read(line)) for read in readers),
        )
        for line in history.rows
    ]
    replaced = history.events.num_replaced
    notes = [
        f"{len(rows)} of {counted(history.num_steps, 'step')}, evenly spaced." if len(rows) < history.num_steps else "",
        f"{counted(replaced, 'line')} of steps that were made again, or without a number, left out."
        if replaced
        else "",
    ]
    note = " ".join(part for part in notes if part)
    return _noted(note, columns, rows, ("time", "phase")) if rows else ""


def _evaluations(events: Events) -> str:
    entries = events.evaluations.entries()
    names = [n for _, line in entries for n in line if n.startswith(("score/", "eval_score/"))]
    scores = tuple(dict.fromkeys(names))[:MAX_SCORES]
    columns = ("time", "version", "cause", "prompts", "failed", "reward", "pass at k", *scores)
    rows: Rows = [
        (
            moment(time),
            text_of(line, "version", 20),
            text_of(line, "cause", 80),
            text_of(line, "num_prompts", 20),
            text_of(line, "num_failed", 20),
            *(figure_text(number(line.get(name))) for name in ("reward_mean", "pass_at_k", *scores)),
        )
        for time, line in entries
    ]
    return _noted(_left_out(events.evaluations), columns, rows, ("time", "cause")) if rows else ""


def _replicas(events: Events) -> str:
    columns = ("replica", "role", "host", "first joined", "joined", "left", "lost", "last reason")
    rows: Rows = [
        (
            name,
            row.role,
            row.host,
            moment(row.first_joined),
            row.num_joined,
            row.num_left,
            row.num_lost,
            row.last_reason,
        )
        for name, row in events.replicas.items()
    ]
    note = "Left: with a goodbye. Lost: dead, evicted or silent."
    return _noted(note, columns, rows, ("replica", "role", "host", "first joined", "last reason")) if rows else ""


def _publications(events: Events) -> str:
    if not events.num_published and not any(row.num_adopted for row in events.replicas.values()):
        return ""
    columns = (
        "replica",
        "adopted",
        "attested",
        "transport",
        "size (MB)",
        "pull, median (ms)",
        "longest",
        "pause, median",
    )
    rows: Rows = [
        (
            name,
            row.num_adopted,
            row.num_attested,
            row.transport,
            figure_text(row.size_bytes / 1e6),
            _milliseconds(row.pull_s),
            figure_text(row.pull_max_s * 1e3),
            _milliseconds(row.pause_s),
        )
        for name, row in events.replicas.items()
        if row.num_adopted
    ]
    note = counted(events.num_published, "publication")
    if not events.publish_s.is_empty():
        note += f", median {events.publish_s.median() * 1e3:.3g} ms until it was offered"
    slowest: Rows = [
        (f"{version:g}", replica, figure_text(pull_s * 1e3), figure_text(pause_s * 1e3))
        for pull_s, _, version, replica, pause_s in sorted(events.slowest, reverse=True)
    ]
    body = _noted(f"{note}.", columns, rows, ("replica", "transport"))
    if slowest:
        body += "<h3>Slowest adoptions</h3>"
        body += table(("version", "replica", "pull (ms)", "pause (ms)"), slowest, text=("replica",))
    return body


def _failures(events: Events) -> str:
    what = {
        "waiting": "generated again",
        "discarded": "discarded",
        "failed": "lease failed",
        "begun_anew": "begun anew",
    }
    rows: Rows = [
        (found.num, what[kind], status, reason, moment(found.first), moment(found.last))
        for (kind, status, reason), found in sorted(events.failures.items(), key=lambda item: -item[1].num)
    ]
    notes = [
        f"{counted(events.num_filtered, 'group')} filtered out for equal rewards" if events.num_filtered else "",
        f"{counted(events.num_interrupted, 'group')} returned unfinished" if events.num_interrupted else "",
        f"{events.num_other_failures} failures with further reasons" if events.num_other_failures else "",
    ]
    note = "; ".join(part for part in notes if part)
    columns = ("number", "groups", "status", "reason", "first", "last")
    if not rows:
        return element("p", f"{note}." if note else "No group failed.", "dim")
    return _noted(f"{note}." if note else "", columns, rows, columns[1:])


def _events(events: Events) -> str:
    columns = ("time", "event", "what")
    rows: Rows = [(moment(time), text_of(line, "kind", 40), event_text(line)) for time, line in events.listed.entries()]
    return _noted(_left_out(events.listed), columns, rows, columns) if rows else ""


def _samples(attempt: Attempt) -> str:
    first: list[dict[str, Any]] = []
    last: deque[dict[str, Any]] = deque(maxlen=NUM_LAST_SAMPLES)
    paths = (attempt.folder / OLD_SAMPLES, attempt.folder / SAMPLES)
    for _, line in itertools.chain.from_iterable(map(read_objects, paths)):
        if len(first) < NUM_FIRST_SAMPLES:
            first.append(line)
        else:
            last.append(line)
    return "".join(map(_sample, [*first, *last]))


def _sample(line: dict[str, Any]) -> str:
    """Return one completion; its texts are those of a model, and hostile."""
    scores = [name for name in line if name.startswith(("score/", "eval_score/", "env/"))][:MAX_SCORES]
    parts = [
        f"{name.replace('_', ' ')} {text_of(line, name, 60)}" for name in (*SAMPLE_FIGURES, *scores) if name in line
    ]
    head = f"step {text_of(line, 'step', 20)} · {text_of(line, 'prompt_id', 80)}"
    return (
        f'<div class="sample"><h3>{escape(head)}</h3>{element("div", " · ".join(parts), "dim small")}'
        f"{element('pre', text_of(line, 'prompt', 5000))}"
        f"{element('pre', text_of(line, 'completion', 5000), 'completion')}</div>"
    )


def _settings(attempt: Attempt) -> str:
    columns = ("setting", "value", "default")
    rows: Rows = list(changed_settings(attempt))
    return table(columns, rows, text=columns) if rows else element("p", "No recipe can be read.", "dim")


def _noted(note: str, columns: Sequence[str], rows: Rows, text: Sequence[str]) -> str:
    return (element("p", note, "dim small") if note else "") + table(columns, rows, text=text)


def _left_out(entries: FirstAndLast) -> str:
    return f"{entries.num_left_out} of {entries.num} are left out here, in the middle." if entries.num_left_out else ""


def _milliseconds(sample: Sample) -> str:
    return "" if sample.is_empty() else figure_text(sample.median() * 1e3)
