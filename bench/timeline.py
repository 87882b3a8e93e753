"""Timeline of the start of a small run, from the start of the process to the third step, as a picture.

    python bench/timeline.py [--out docs/images/start.png]

It runs the recipe of bench/loop.py for a few steps. Every process writes when it imports modules and when it is in one
of the functions that take time at a start (bench/timeline/sitecustomize.py, on PYTHONPATH). So the run is some tenths
of a second slower than without; bench/loop.py measures the start itself. The fork server imports torch and
transformers, and policy and rollouts are forked from it (docs/decisions/0041-lean-imports.md).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

from loop import HERE, Setting, loop_recipe, prepare, run_starling

NUM_STEPS = 3
COLOURS = {
    "imports": "0.72",
    "data": "tab:olive",
    "model": "tab:blue",
    "weights": "tab:orange",
    "scorers": "tab:purple",
    "step": "tab:green",
}
Span = tuple[int, str, str, float, float]


def run_marked(folder: Path) -> tuple[float, list[Span], dict[str, float], dict[int, str]]:
    """Run; return the start, the spans, the times of events by name, and the names of the replicas by process id."""
    spans = folder / "spans.jsonl"
    os.environ.update(TIMELINE=str(spans), PYTHONPATH=str(HERE / "timeline"))
    started = run_starling(loop_recipe(*prepare(), seed=0, num_steps=NUM_STEPS, setting=Setting(2, 1)), folder)
    run = folder / "loop" / "attempt-1"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    published = next(line["time"] for line in lines if line["kind"] == "published")
    steps = [line["time"] for line in lines if line["kind"] == "step"]
    joined = [line for line in lines if line["kind"] == "joined"]
    names = {line["pid"]: line["replica"] for line in joined}
    events = {"version 0 published": published, **{f"step {n + 1}": time for n, time in enumerate(steps)}}
    return started, [tuple(json.loads(line)) for line in spans.read_text().splitlines()], events, names


def named(spans: list[Span], names: dict[int, str]) -> dict[int, str]:
    """Return `names` with those of the processes that do not join: by what they import."""
    marks = {"starling.cli.run.preload": "fork server", "load_data": "controller", "starling.cli.app": "starling run"}
    found = {pid: marks[label] for pid, _, label, _, _ in spans if label in marks and pid not in names}
    return {**found, **names}


def draw(started: float, spans: list[Span], events: dict[str, float], names: dict[int, str], out: Path) -> None:
    """Draw one row per process."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    rows = sorted(names, key=lambda pid: min((span[3] for span in spans if span[0] == pid), default=0.0))
    figure, axes = pyplot.subplots(figsize=(11, 3.6))
    # Imports first: those of a background thread last longer than what the others do meanwhile.
    for pid, kind, _, begin, end in sorted(spans, key=lambda one: one[1] != "imports"):
        if pid in names and kind in COLOURS:
            axes.barh(rows.index(pid), end - begin, left=begin - started, color=COLOURS[kind], height=0.6)
    for number, (name, time) in enumerate(events.items()):
        axes.axvline(time - started, color="0.2", linewidth=0.8)
        axes.annotate(name, (time - started, -0.7 - 0.45 * (number % 3)), fontsize=7, annotation_clip=False)
    axes.set_yticks(range(len(rows)), [names[pid] for pid in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, max(events.values()) - started + 0.3)
    axes.set_xlabel("seconds since the start of `starling run`")
    axes.legend(handles=[Patch(color=colour, label=kind) for kind, colour in COLOURS.items()], ncols=6, fontsize=7)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def main() -> None:
    """Run once, draw, and print the seconds to the events; they are no figures, since the marks take time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "images" / "start.png")
    out: Path = parser.parse_args().out.absolute()
    with tempfile.TemporaryDirectory(prefix="starling-timeline-") as temporary:
        started, spans, events, names = run_marked(Path(temporary))
    draw(started, spans, events, named(spans, names), out)
    for name, time in events.items():
        print(f"{name}: {time - started:.2f} s")
    print(out)


if __name__ == "__main__":
    main()
