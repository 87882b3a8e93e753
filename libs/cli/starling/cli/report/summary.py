"""Report of a finished run: a table, and the reward curve as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from starling.cli.console import Console
from starling.cli.report.statistics import EVALUATION_SCORE, Curve, FileStatistics, RunStatistics, gather
from starling.cli.run.attempt import Attempt, damaged_lines, iter_metrics
from starling.cli.run.screen import short_path
from starling.common.counts import counted
from starling.controller.data.trajectories import FOLDER


def report(attempt: Attempt, seconds: float, console: Console) -> None:
    """Print the table of a finished run and draw its curve. Raises ConfigError when metrics.jsonl is damaged."""
    with damaged_lines(attempt.metrics, "of a step, an evaluation, an alarm or an adoption"):
        _report(attempt, seconds, console)


def _report(attempt: Attempt, seconds: float, console: Console) -> None:
    run = gather(iter_metrics(attempt.metrics))
    table = Table(title=f"{attempt.folder.parent.name}: {seconds:.0f} s", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, text in file_rows(run.files) if run.files.num else _rows(run):
        table.add_row(name, text)
    if (attempt.folder / FOLDER).is_dir():
        table.add_row("trajectories", short_path(attempt.folder / FOLDER))
    if run.num_rl_steps:
        curve = attempt.folder / "reward.png"
        try:
            draw_curve(run.rewards.points(), run.held_out.points(), curve)
            table.add_row("reward curve", short_path(curve))
        except OSError as error:  # mostly a full disk; the run is over, and its results do not depend on the picture
            table.add_row("reward curve", f"not drawn: {error.strerror}")
    table.add_row("metrics", short_path(attempt.metrics))
    for path in run.checkpoints:
        table.add_row("checkpoint", short_path(Path(path)))
    console.print(table)
    tasks = task_table(run.last_evaluation)
    if tasks is not None:
        console.print(tasks)


def task_table(last: dict[str, Any]) -> Table | None:
    """Return the last evaluation by task, or None when its prompts name no tasks (``metadata.task``).

    `last`: its line, empty without an evaluation.
    """
    tasks: dict[str, dict[str, Any]] = last.get("tasks", {})
    if not tasks:
        return None
    rates = [name for name in last if name == "reward_mean" or (name.startswith("pass_at_") and last["k"])]
    table = Table(title=f"held-out prompts under version {last['version']}, by task", title_justify="left")
    for column in ("task", "prompts", *rates):
        table.add_column(column.replace("pass_at_k", f"pass_at_{last['k']}"))
    for task, found in tasks.items():
        values = [found.get(rate) for rate in rates]
        cells = ["" if value is None else f"{value:.3f}" for value in values]
        table.add_row(task, str(found["num_prompts"]), *cells)
    return table


def _rows(run: RunStatistics) -> list[tuple[str, str]]:
    rows = [("steps", f"{run.num_steps}, {run.num_rl_steps} of them by reinforcement")]
    if run.num_rl_steps:
        rows.append(("training reward", f"{_first_and_last(run.rewards)} (first and last tenth of the steps)"))
        rows += [
            (f"evaluation score {scorer}", f"{_first_and_last(curve)} (of the steps that have it)")
            for scorer, curve in run.evaluation_scores.items()
        ]
        mean = run.staleness_sum / run.num_rl_steps
        rows.append(("staleness", f"mean {mean:.2f}, most {run.staleness_max:g}"))
    if run.num_evaluations > 1:
        begin, end = run.first_evaluation, run.last_evaluation
        for name in begin:
            label = _label(name)
            before, after = begin[name], end.get(name)
            if label and before is not None and after is not None:
                rows.append((f"held-out {label}", f"{before:.3f} -> {after:.3f} ({after - before:+.3f})"))
    rows += run.alarms.rows()
    rows += [(f"logger {line['logger']}", f"{line['dropped']} dropped: {line['reason']}") for line in run.losses]
    adopted = run.adoptions
    if adopted.num:
        rows.append(
            (
                "weight sync",
                f"{counted(adopted.num, 'adoption')} over {adopted.transport}, {adopted.num_attested} attested; "
                f"median pull {adopted.pull_s.median() * 1e3:.1f} ms, pause {adopted.pause_s.median() * 1e3:.1f} ms",
            )
        )
    return rows


def _first_and_last(curve: Curve) -> str:
    """Return the means of the first and the last tenth of a curve."""
    values = [value for _, value in curve.points()]
    tenth = max(1, len(values) // 10)
    first, last = (sum(part) / tenth for part in (values[:tenth], values[-tenth:]))
    return f"{first:.3f} -> {last:.3f}"


def _label(name: str) -> str:
    """Return what a figure of an evaluation is called; empty if it is no score."""
    if name == "reward_mean":
        return "reward"
    if name.startswith(EVALUATION_SCORE):
        return f"evaluation score {name.removeprefix(EVALUATION_SCORE)}"
    return name.removeprefix("score/") if name.startswith("score/") else ""


def file_rows(files: FileStatistics) -> list[tuple[str, str]]:
    """Return the rows of a run without a policy, from the metrics of its files."""
    rows = [
        (
            "prompts",
            f"{files.num_prompts} in {counted(files.num, 'file')}, {files.num_failed} of them without an answer",
        ),
        ("tokens", f"{files.num_tokens:,}"),
    ]
    if files.num_rewarded:
        rows.append(("reward", f"mean {files.reward_sum / files.num_rewarded:.3f}"))
    return rows


def draw_curve(rewards: list[tuple[float, float]], held_out: list[tuple[float, float]], path: Path) -> None:
    """Draw reward against step, with the evaluations on held-out prompts by version."""
    # The import of matplotlib takes most of a second.
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    x, y = [step for step, _ in rewards], [reward for _, reward in rewards]
    figure, axes = plt.subplots(figsize=(8, 4.2), dpi=120, layout="constrained")
    axes.plot(x, y, color="#9ecae1", linewidth=1, label="step")
    axes.plot(x, _smooth(y), color="#08519c", linewidth=2, label="moving mean")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o--", color="#d95f0e", label="held-out prompts")
    axes.set(xlabel="step", ylabel="mean reward", title="Reward")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path.unlink(missing_ok=True)  # it may be a link to another file
    figure.savefig(path)
    plt.close(figure)


def _smooth(values: list[float], window: int = 9) -> list[float]:
    out = []
    for i in range(len(values)):
        part = values[max(0, i - window + 1) : i + 1]
        out.append(sum(part) / len(part))
    return out
