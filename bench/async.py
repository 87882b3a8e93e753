"""Speed-up by asynchrony: the real services on simulated devices, by staleness and by ratio.

    python bench/async.py [--quick] [--picture FILE.png]

Controller, policy, reward service and two rollouts run as `starling run` starts them, with all traffic of a real run:
prompts, leases, completions, scores, steps, publications, adoptions. Only the devices are simulated: the engine
(sleepy_engine.py) takes a GPU's time for each decode step, and completion lengths have a long tail; a training step
sleeps (sleepy_training.py). So two cores suffice for a cluster, and any loss against the ideal is Starling's.

The *ratio* is that of the seconds in which the rollouts generate one step's groups by themselves to those of a training
step. The *ideal* speed-up over synchronous training (staleness 0) is (generation + training) / max(full, training): a
synchronous step has one after the other and waits for its longest completion; in an ideal asynchronous one both run
side by side, and the rollouts, never without work, generate a step's tokens in `full` seconds, all their rows taken.
That is more than generation + training over the longer of the two, which is in the detail as `ideal_overlap`. What no
software at all would reach at each staleness is simulated (asynchronous_ideal.py) and drawn as a dotted line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import tomli_w
from asynchronous_device import Profile
from asynchronous_ideal import Work, seconds_per_step, step_ends
from figure import machine, print_figure, progress, rounded, versions

HERE = Path(__file__).resolve().parent
GOAL: Final = 0.9
MODEL: Final = {
    "model_type": "qwen3",
    "alphabet": "abcdefghijklmnopqrstuvwxyz>",
    "max_length": 1024,
    "config": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "tie_word_embeddings": True,
    },
}
PROFILE: Final = Profile(step_s=0.01, fixed_share=0.5, max_rows=16, median_length=100.0, sigma=0.8)


@dataclass(frozen=True)
class Scale:
    """Size of the measurement."""

    ratios: tuple[float, ...]
    staleness: tuple[int, ...]
    train_s: float
    num_steps: int
    first: int
    """Step after which time is measured; until then the pipeline fills."""
    last: int
    """Last measured step; afterwards the pipeline drains."""
    run_timeout_s: float


FULL = Scale((0.5, 1.0, 2.0), (0, 1, 2, 4, 8), 1.2, 36, 9, 27, 600.0)
QUICK = Scale((1.0,), (0, 2), 0.6, 14, 3, 11, 120.0)


@dataclass(frozen=True)
class Point:
    """One run: seconds per step, measured and simulated without software."""

    measured_s: float
    simulated_s: float
    staleness_mean: float


def work_of(ratio: float, scale: Scale) -> Work:
    """Return the work whose steps take `ratio` times as long to generate, by themselves, as to train."""
    work = Work(
        PROFILE,
        train_s=scale.train_s,
        num_steps=scale.num_steps,
        num_rollouts=2,
        num_slots=6,
        prompts_per_step=8,
        group_size=4,
        max_tokens=1000,
        seed=0,
    )
    step_s = PROFILE.step_s * ratio * scale.train_s / work.batch_s
    return replace(work, profile=replace(PROFILE, step_s=step_s))


# --- one run -------------------------------------------------------------------------------------------------------


def make_model(folder: Path, profile: Profile) -> Path:
    """Write the folder of the model, with the profile of its device. Returns its path."""
    from sleepy_engine import PROFILE as PROFILE_FILE

    from starling.cli.model.scratch import ScratchSettings, make_model_folder

    path = folder / "model"
    make_model_folder(ScratchSettings.model_validate(MODEL), path)
    (path / PROFILE_FILE).write_text(json.dumps(asdict(profile)))
    return path


def recipe_of(work: Work, max_staleness: int, folder: Path) -> dict[str, Any]:
    """Return the recipe of a run in `folder`."""
    data = folder / "prompts.jsonl"
    prompts = (
        {"prompt": f"{'abcdefgh'[i % 8]}>", "reference": ""} for i in range(work.num_steps * work.prompts_per_step)
    )
    data.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return {
        "run": {"name": "async", "kind": "rl", "seed": work.seed, "folder": str(folder)},
        "launch": {"num_rollouts": work.num_rollouts, "screen": "plain"},
        "model": {"path": str(make_model(folder, work.profile)), "device": "cpu"},
        "data": {"source": str(data), "format": "{prompt}", "reference_column": "reference", "shuffle": False},
        "rl": {
            "num_steps": work.num_steps,
            "prompts_per_step": work.prompts_per_step,
            "group_size": work.group_size,
            "max_staleness": max_staleness,
        },
        "sampling": {"max_tokens": work.max_tokens},
        "rollout": {
            "engine": f"{HERE / 'sleepy_engine.py'}:SleepyEngine",
            "num_slots": work.num_slots,
            "max_rows": work.profile.max_rows,
        },
        "policy": {
            "init": "random",
            "optimizer": {"learning_rate": 1e-4},
            "algorithm": {
                "name": f"{HERE / 'sleepy_training.py'}:algorithm",
                "options": {"train_s": work.train_s},
            },
        },
        "reward": {"scorers": [{"name": f"{HERE / 'sleepy_training.py'}:score"}]},
        "controller": {"save_every": 0},
        "logging": {"samples_per_step": 0},
    }


def measure_run(work: Work, max_staleness: int, scale: Scale) -> Point:
    """Run once, and simulate the same run without software overhead."""
    with tempfile.TemporaryDirectory(prefix="starling-async-") as temporary:
        folder = Path(temporary)
        file = folder / "recipe.toml"
        file.write_text(tomli_w.dumps(recipe_of(work, max_staleness, folder)))
        run_logged([str(Path(sys.executable).with_name("starling")), "run", str(file)], folder, scale.run_timeout_s)
        lines = (folder / "async" / "attempt-1" / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if line["kind"] == "step"]
    check_tokens(work, steps)
    ends = [float(step["time"]) for step in steps]
    measured = (ends[scale.last - 1] - ends[scale.first - 1]) / (scale.last - scale.first)
    simulated = seconds_per_step(step_ends(work, max_staleness), scale.first, scale.last)
    ages = [float(step["staleness_mean"]) for step in steps[scale.first : scale.last]]
    return Point(measured, simulated, fmean(ages))


def check_tokens(work: Work, steps: list[dict[str, Any]]) -> None:
    """Assert that the run generated exactly the simulated tokens."""
    for number, step in enumerate(steps):
        first = number * work.prompts_per_step
        expected = sum(sum(work.lengths(group)) for group in range(first, first + work.prompts_per_step))
        assert step["num_tokens"] == expected, f"step {number + 1} has {step['num_tokens']} tokens, not {expected}"


def run_logged(command: list[str], folder: Path, timeout_s: float) -> None:
    """Run a command to its end, and show its log if it fails."""
    with (folder / "output.log").open("w+") as log:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            timeout=timeout_s,
            check=False,
        )
        if done.returncode:
            log.seek(0)
            raise SystemExit(f"{' '.join(command)} exited with {done.returncode}:\n{log.read()[-4000:]}")


# --- the figures ---------------------------------------------------------------------------------------------------


def measure(scale: Scale) -> dict[float, dict[int, Point]]:
    """Return the points of each ratio, by staleness."""
    points: dict[float, dict[int, Point]] = {}
    for ratio in scale.ratios:
        work = work_of(ratio, scale)
        for max_staleness in scale.staleness:
            point = measure_run(work, max_staleness, scale)
            points.setdefault(ratio, {})[max_staleness] = point
            progress(
                f"generation / training {ratio:g}, staleness {max_staleness}: {point.measured_s:.3f} s a step, "
                f"{point.simulated_s:.3f} s without any software"
            )
    return points


def ideal_speed_up(work: Work) -> float:
    """Return the speed-up of an ideal asynchronous step over a synchronous one."""
    return (work.batch_s + work.train_s) / max(work.full_s, work.train_s)


def report(points: dict[float, dict[int, Point]], scale: Scale, picture: Path | None) -> None:
    """Print a figure for each ratio, and draw the curves."""
    for ratio, by_staleness in points.items():
        work = work_of(ratio, scale)
        ideal, most = ideal_speed_up(work), max(by_staleness)
        synchronous = by_staleness[0].measured_s
        detail = {
            "max_staleness": most,
            "speed_up": {s: rounded(synchronous / point.measured_s) for s, point in by_staleness.items()},
            "ideal_speed_up": rounded(ideal),
            "ideal_overlap": rounded((work.batch_s + work.train_s) / max(work.batch_s, work.train_s)),
            "seconds_per_step": {s: rounded(point.measured_s) for s, point in by_staleness.items()},
            "seconds_per_step_simulated": {s: rounded(point.simulated_s) for s, point in by_staleness.items()},
            "staleness_mean": {s: rounded(point.staleness_mean, 3) for s, point in by_staleness.items()},
            "generation_s": rounded(work.batch_s),
            "generation_full_s": rounded(work.full_s),
            "train_s": work.train_s,
            "tokens_per_step": rounded(work.tokens_per_step),
            "steps": scale.last - scale.first,
            **machine(),
            "versions": versions("torch", "pyzmq"),
        }
        name = f"speed_up_over_ideal_at_ratio_{ratio:g}"
        value = synchronous / by_staleness[most].measured_s / ideal
        print_figure("async", name, value, unit="ratio", goal=GOAL, better="higher", detail=detail)
        worst = min(point.simulated_s / point.measured_s for point in by_staleness.values())
        print_figure(
            "async",
            f"throughput_over_simulated_at_ratio_{ratio:g}",
            worst,
            unit="ratio",
            goal=GOAL,
            better="higher",
            detail={"see": "above", "worst_of_staleness": list(by_staleness)},
        )
    if picture is not None:
        draw(points, scale, picture)


def draw(points: dict[float, dict[int, Point]], scale: Scale, picture: Path) -> None:
    """Draw tokens per second against staleness: measured, without software, and the bound; a panel for each ratio."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(points), sharey=True, squeeze=False)[0]
    for panel, (ratio, by_staleness) in zip(panels, points.items(), strict=True):
        work = work_of(ratio, scale)
        tokens, at = work.tokens_per_step / 1000, range(len(by_staleness))
        panel.plot(at, [tokens / p.measured_s for p in by_staleness.values()], "o-", label="measured")
        panel.plot(at, [tokens / p.simulated_s for p in by_staleness.values()], ":", label="no software at all")
        panel.axhline(tokens / max(work.full_s, work.train_s), color="grey", linewidth=0.8, label="ideal")
        panel.set_xticks(at, [str(staleness) for staleness in by_staleness])
        panel.set_title(f"generation / training = {ratio:g}")
        panel.set_xlabel("max_staleness")
        panel.grid(alpha=0.3)
    panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel("thousand tokens per second")
    panels[0].legend(loc="lower right")
    figure.savefig(picture, dpi=110)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one ratio, staleness 0 and 2, few steps")
    parser.add_argument("--picture", type=Path, help="where to draw the curves")
    arguments = parser.parse_args()
    scale = QUICK if arguments.quick else FULL
    report(measure(scale), scale, arguments.picture)


if __name__ == "__main__":
    main()
