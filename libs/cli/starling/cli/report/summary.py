"""Report of a finished run: a table, and the reward curve as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from starling.cli.run.attempt import Attempt, read_metrics
from starling.cli.run.screen import short_path
from starling.controller.data.trajectories import FOLDER


def report(attempt: Attempt, seconds: float, console: Console) -> None:
    """Print the table of a finished run and draw its curve."""
    lines = read_metrics(attempt.metrics)
    steps = [line for line in lines if line["kind"] == "step" and "staleness_max" in line]
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    adopted = [line for line in lines if line["kind"] == "adopted"]
    table = Table(title=f"{attempt.folder.parent.name}: {seconds:.0f} s", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    files = [line for line in lines if line["kind"] == "step" and "num_prompts" in line]
    for name, text in file_rows(files) if files else _rows(lines, steps, evaluations, adopted):
        table.add_row(name, text)
    if (attempt.folder / FOLDER).is_dir():
        table.add_row("trajectories", short_path(attempt.folder / FOLDER))
    if steps:
        curve = attempt.folder / "reward.png"
        draw_curve(steps, evaluations, curve)
        table.add_row("reward curve", short_path(curve))
    table.add_row("metrics", short_path(attempt.metrics))
    for line in lines:
        if line["kind"] == "checkpoint":
            table.add_row("checkpoint", short_path(Path(line["path"])))
    console.print(table)
    tasks = task_table(evaluations)
    if tasks is not None:
        console.print(tasks)


def task_table(evaluations: list[dict[str, Any]]) -> Table | None:
    """Return the last evaluation by task, or None when its prompts name no tasks (``metadata.task``)."""
    tasks: dict[str, dict[str, Any]] = evaluations[-1].get("tasks", {}) if evaluations else {}
    if not tasks:
        return None
    last = evaluations[-1]
    rates = [name for name in last if name == "reward_mean" or (name.startswith("pass_at_") and last["k"])]
    table = Table(title=f"held-out prompts under version {last['version']}, by task", title_justify="left")
    for column in ("task", "prompts", *rates):
        table.add_column(column.replace("pass_at_k", f"pass_at_{last['k']}"))
    for task, found in tasks.items():
        values = [found.get(rate) for rate in rates]
        cells = ["" if value is None else f"{value:.3f}" for value in values]
        table.add_row(task, str(found["num_prompts"]), *cells)
    return table


def _rows(
    lines: list[dict[str, Any]],
    steps: list[dict[str, Any]],
    evaluations: list[dict[str, Any]],
    adopted: list[dict[str, Any]],
) -> list[tuple[str, str]]:
    rows = [("steps", f"{sum(line['kind'] == 'step' for line in lines)}, {len(steps)} of them by reinforcement")]
    if steps:
        tenth = max(1, len(steps) // 10)
        first, last = (sum(map(reward_of, part)) / tenth for part in (steps[:tenth], steps[-tenth:]))
        rows.append(("training reward", f"{first:.3f} -> {last:.3f} (first and last tenth of the steps)"))
        stale = max(step["staleness_max"] for step in steps)
        mean = sum(step["staleness_mean"] for step in steps) / len(steps)
        rows.append(("staleness", f"mean {mean:.2f}, most {stale}"))
    if len(evaluations) > 1:
        scores = [name for name in evaluations[0] if name == "reward_mean" or name.startswith("score/")]
        for name in scores:
            before, after = evaluations[0][name], evaluations[-1][name]
            if before is not None and after is not None:
                label = "reward" if name == "reward_mean" else name.removeprefix("score/")
                rows.append((f"held-out {label}", f"{before:.3f} -> {after:.3f} ({after - before:+.3f})"))
    rows += alarm_rows(lines)
    rows += [(f"logger {line['logger']}", f"{line['dropped']} dropped: {line['reason']}") for line in _lost(lines)]
    if adopted:
        pull = sorted(line["pull_s"] for line in adopted)[len(adopted) // 2]
        pause = sorted(line["pause_s"] for line in adopted)[len(adopted) // 2]
        proven = sum(line["attested"] for line in adopted)
        rows.append(
            (
                "weight sync",
                f"{len(adopted)} adoptions over {adopted[0]['transport']}, {proven} attested; "
                f"median pull {pull * 1e3:.1f} ms, pause {pause * 1e3:.1f} ms",
            )
        )
    return rows


def file_rows(files: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the rows of a run without a policy, from the metrics of its files."""
    total = {name: sum(file[name] for file in files) for name in ("num_prompts", "num_failed", "num_tokens")}
    rows = [
        ("prompts", f"{total['num_prompts']} in {len(files)} files, {total['num_failed']} of them without an answer"),
        ("tokens", f"{total['num_tokens']:,}"),
    ]
    rewards = [
        (file["reward_mean"], file["num_prompts"] - file["num_failed"]) for file in files if "reward_mean" in file
    ]
    if rewards:
        mean = sum(reward * num for reward, num in rewards) / sum(num for _, num in rewards)
        rows.append(("reward", f"mean {mean:.3f}"))
    return rows


def alarm_rows(lines: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return one row for each kind of alarm: the steps, the first value with its bound, and the meaning."""
    spans: dict[str, list[str]] = {}
    meanings: dict[str, str] = {}
    for line in lines:
        if line["kind"] == "alarm":
            spans.setdefault(line["name"], []).append(f"since step {line['step']}")
            meanings.setdefault(
                line["name"], f"{line['value']:.3g} against a bound of {line['bound']:g}: {line['text']}"
            )
        elif line["kind"] == "alarm_over" and line["name"] in spans:
            began = spans[line["name"]][-1].removeprefix("since step ")
            spans[line["name"]][-1] = f"steps {began} to {line['step'] - 1}"
    return [(f"alarm {name}", f"{_listed(spans[name])}; {meanings[name]}") for name in spans]


def _listed(spans: list[str], most: int = 3) -> str:
    """Join the first `most` spans, and count the others."""
    more = len(spans) - most
    return ", ".join(spans[:most]) + (f", and {more} times more" if more > 0 else "")


def _lost(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["kind"] == "logger"]


def reward_of(step: dict[str, Any]) -> float:
    """Return the mean reward of a step; with dynamic sampling that of all sampled groups, also the filtered ones."""
    reward: float = step.get("sampled_reward_mean", step["reward_mean"])
    return reward


def draw_curve(steps: list[dict[str, Any]], evaluations: list[dict[str, Any]], path: Path) -> None:
    """Draw reward against step, with the evaluations on held-out prompts."""
    # The import of matplotlib takes most of a second.
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    x = [step["step"] for step in steps]
    y = [reward_of(step) for step in steps]
    figure, axes = plt.subplots(figsize=(8, 4.2), dpi=120, layout="constrained")
    axes.plot(x, y, color="#9ecae1", linewidth=1, label="step")
    axes.plot(x, _smooth(y), color="#08519c", linewidth=2, label="moving mean")
    points = [(e["version"], e["reward_mean"]) for e in evaluations if e["reward_mean"] is not None]
    if points:
        axes.plot(*zip(*points, strict=True), "o--", color="#d95f0e", label="held-out prompts")
    axes.set(xlabel="step", ylabel="mean reward", title="Reward")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path)
    plt.close(figure)


def _smooth(values: list[float], window: int = 9) -> list[float]:
    out = []
    for i in range(len(values)):
        part = values[max(0, i - window + 1) : i + 1]
        out.append(sum(part) / len(part))
    return out
