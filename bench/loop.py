"""Seconds until a model reaches a reward: Starling compared with TRL's GRPOTrainer, on the CPU.

    python bench/loop.py [--quick] [--rounds N]

Both sides start from one checkpoint, made here by a short supervised run, and learn to spell words backward: the same
prompts in the same order, the same reward function (loop_reward.py), the same number of prompts and completions in a
step, one update per step, the same loss (clipped ratio, mean over all tokens, advantages scaled by the group's
deviation, no KL), the same AdamW, in single precision. Starling runs as `starling run` starts it: a controller, a
policy and a reward service, one thread each, with one rollout and tokens of at most one or two versions before, and
with two rollouts. TRL runs in one process, in an environment of its own that is made here from trl-requirements.txt
(bench/.cache/trl), with one thread and with a thread for each core. Of each side the setting with the fastest steps
counts; tokens of older versions may cost further steps, which count.

The clock runs until the mean reward of the training completions, over the last 10 steps, reaches a threshold. There are
two figures: from the start of the process (`starling run`, or python), with all imports and loading; and from the time
when the first completion can be sampled. The sides run alternately; each round has its own seed.

The learning rate was chosen for TRL: of 1e-4, 2e-4, 3e-4 and 5e-4 the one with which it needs the fewest steps.
`--quick` runs one round, with one rollout, at most two versions, and a thread of TRL for each core. It takes less than
a minute once environment and checkpoint are in bench/.cache.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import tomli_w
from environment import CACHE, environment_python
from figure import machine, print_figure, progress, rounded, versions

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE / "trl-requirements.txt"
RUN_TIMEOUT_S = 600

NUM_WORDS = 6000
WINDOW = 10
PROMPTS_PER_STEP, GROUP_SIZE, MAX_TOKENS, CLIP = 16, 8, 12, 0.2
OPTIMIZER = {"learning_rate": 3e-4, "betas": [0.9, 0.999], "eps": 1e-8, "max_grad_norm": 1.0}

MODEL = {
    "model_type": "qwen3",
    "alphabet": "abcdefghijklmnopqrstuvwxyz>",
    "max_length": 64,
    "config": {
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "tie_word_embeddings": True,
    },
}
WARM_UP: dict[str, Any] = {
    "sft": {"num_steps": 170, "examples_per_step": 32},
    "policy": {"sft": {"optimizer": {"learning_rate": 2e-3, "warmup_steps": 10}}},
}


@dataclass(frozen=True)
class Setting:
    """A setting of Starling's side."""

    num_rollouts: int
    max_staleness: int

    @property
    def name(self) -> str:
        """Return the name of the side."""
        return f"starling_{self.num_rollouts}_rollouts_{self.max_staleness}_versions"


@dataclass(frozen=True)
class Scale:
    """Size of the measurement."""

    rounds: int
    num_steps: int
    threshold: float
    settings: tuple[Setting, ...]
    trl_threads: tuple[int, ...]


FULL = Scale(5, 140, 0.60, (Setting(1, 1), Setting(1, 2), Setting(2, 1)), (1, os.cpu_count() or 1))
QUICK = Scale(1, 130, 0.60, (Setting(1, 2),), FULL.trl_threads[-1:])


@dataclass(frozen=True)
class RunTimes:
    """One run: its start, the time when it could sample, and each step's end and mean reward."""

    started: float
    begun: float
    ends: list[float]
    rewards: list[float]

    def reached(self, threshold: float) -> int | None:
        """Return the first step whose moving mean reaches the threshold, counted from 1."""
        for step in range(WINDOW, len(self.rewards) + 1):
            if sum(self.rewards[step - WINDOW : step]) / WINDOW >= threshold:
                return step
        return None

    @property
    def step_s(self) -> float:
        """Return the mean seconds of a step."""
        return (self.ends[-1] - self.begun) / len(self.ends)


# --- common inputs -------------------------------------------------------------------------------------------------


def prepare() -> tuple[Path, Path]:
    """Return the cached prompts and checkpoint; create them on the first call."""
    recipe = {
        "run": {"name": "warm-up", "kind": "sft"},
        "launch": {"num_rollouts": 0, "num_rewards": 0, "screen": "plain"},
        "model": {"scratch": MODEL, "device": "cpu"},
        "data": {"size": NUM_WORDS},
        **WARM_UP,
    }
    folder = CACHE / f"loop-{hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:12]}"
    data, checkpoint = folder / "words.jsonl", folder / "checkpoint"
    if not checkpoint.exists():
        progress("making the checkpoint that both sides start from")
        folder.mkdir(parents=True, exist_ok=True)
        write_words(data)
        with tempfile.TemporaryDirectory(prefix="starling-loop-") as temporary:
            recipe["data"] = data_section(data)
            run_starling(recipe, Path(temporary))
            made = Path(temporary) / "warm-up" / "attempt-1" / "checkpoints" / f"step-{WARM_UP['sft']['num_steps']}"
            shutil.move(made, checkpoint)
    return data, checkpoint


def write_words(path: Path) -> None:
    """Write the words of reasoning-gym's `spell_backward`, each once."""
    from reasoning_gym.factory import create_dataset

    entries = create_dataset("spell_backward", seed=0, size=NUM_WORDS, min_word_len=3, max_word_len=8)
    words = {entry["metadata"]["word"]: entry["answer"] for entry in entries}
    lines = [json.dumps({"prompt": f"{word}>", "reference": answer}) for word, answer in words.items()]
    path.write_text("\n".join(lines) + "\n")


def data_section(data: Path) -> dict[str, Any]:
    """Return the recipe's section that reads the words in the order of the file."""
    return {"source": str(data), "format": "{prompt}", "reference_column": "reference", "shuffle": False}


# --- Starling ------------------------------------------------------------------------------------------------------


def run_starling(recipe: dict[str, Any], folder: Path) -> float:
    """Run a recipe to its end; return its start time."""
    recipe["run"]["folder"] = str(folder)
    file = folder / "recipe.toml"
    file.write_text(tomli_w.dumps(recipe))
    return run_logged([str(Path(sys.executable).with_name("starling")), "run", str(file)], folder)


def loop_recipe(data: Path, checkpoint: Path, seed: int, num_steps: int, setting: Setting) -> dict[str, Any]:
    """Return the recipe of Starling's runs; a rollout has slots for a step of each version that tokens can be of."""
    slots = PROMPTS_PER_STEP * setting.max_staleness
    return {
        "run": {"name": "loop", "kind": "rl", "seed": seed},
        "launch": {"num_rollouts": setting.num_rollouts, "screen": "plain"},
        "rollout": {"num_slots": slots, "max_rows": slots * GROUP_SIZE},
        "model": {"path": str(checkpoint), "device": "cpu"},
        "data": data_section(data),
        "rl": {
            "num_steps": num_steps,
            "prompts_per_step": PROMPTS_PER_STEP,
            "group_size": GROUP_SIZE,
            "max_staleness": setting.max_staleness,
        },
        "sampling": {"max_tokens": MAX_TOKENS},
        "policy": {
            "optimizer": OPTIMIZER,
            "algorithm": {"aggregate": "token_mean", "clip_low": CLIP, "clip_high": CLIP},
        },
        "reward": {"scorers": [{"name": f"{HERE / 'loop_reward.py'}:score"}]},
    }


def time_starling(data: Path, checkpoint: Path, seed: int, scale: Scale, setting: Setting) -> RunTimes:
    """Train once with Starling."""
    recipe = loop_recipe(data, checkpoint, seed, scale.num_steps, setting)
    with tempfile.TemporaryDirectory(prefix="starling-loop-") as temporary:
        started = run_starling(recipe, Path(temporary))
        metrics = Path(temporary) / "loop" / "attempt-1" / "metrics.jsonl"
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    # The checkpoint is version 0; once it is published, the rollouts pull it and begin.
    begun = next(line["time"] for line in lines if line["kind"] == "published")
    return RunTimes(started, begun, [step["time"] for step in steps], [step["reward_mean"] for step in steps])


# --- TRL -----------------------------------------------------------------------------------------------------------


def time_trl(python: Path, data: Path, checkpoint: Path, seed: int, scale: Scale, num_threads: int) -> RunTimes:
    """Train once with TRL."""
    with tempfile.TemporaryDirectory(prefix="starling-loop-") as temporary:
        folder = Path(temporary)
        settings = {
            "data": str(data),
            "model": str(checkpoint),
            "out": str(folder / "steps.jsonl"),
            "folder": str(folder / "trl"),
            "seed": seed,
            "num_threads": num_threads,
            "num_steps": scale.num_steps,
            "prompts_per_step": PROMPTS_PER_STEP,
            "group_size": GROUP_SIZE,
            "max_tokens": MAX_TOKENS,
            "clip": CLIP,
            **OPTIMIZER,
        }
        (folder / "settings.json").write_text(json.dumps(settings))
        command = [str(python), str(HERE / "loop_trl.py"), str(folder / "settings.json")]
        started = run_logged(command, folder, OMP_NUM_THREADS=str(num_threads))
        first, *steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    return RunTimes(started, first["time"], [step["time"] for step in steps], [step["reward"] for step in steps])


def run_logged(command: list[str], folder: Path, **environment: str) -> float:
    """Run a command to its end, and show its log if it fails; return its start time."""
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with (folder / "output.log").open("w+") as log:
        started = time.time()
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **offline, **environment},
            timeout=RUN_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            log.seek(0)
            raise SystemExit(f"{' '.join(command)} exited with {done.returncode}:\n{log.read()[-4000:]}")
    return started


# --- the figures ---------------------------------------------------------------------------------------------------


def measure(scale: Scale) -> dict[str, list[RunTimes]]:
    """Return the runs of each side by name."""
    python = environment_python("trl", REQUIREMENTS, torch=True)
    data, checkpoint = prepare()
    run_times: dict[str, list[RunTimes]] = {}
    for seed in range(scale.rounds):
        runs = {}
        for setting in scale.settings:
            runs[setting.name] = time_starling(data, checkpoint, seed, scale, setting)
        for num_threads in dict.fromkeys(scale.trl_threads):
            runs[f"trl_{num_threads}"] = time_trl(python, data, checkpoint, seed, scale, num_threads)
        for side, times in runs.items():
            run_times.setdefault(side, []).append(times)
            step = times.reached(scale.threshold)
            progress(
                f"round {seed + 1} of {scale.rounds}, {side}: {times.begun - times.started:.1f} s to the first "
                f"step, {times.step_s:.3f} s a step, {scale.threshold} at step {step}"
            )
    return run_times


def summary(run_times: list[RunTimes], threshold: float) -> dict[str, Any]:
    """Return the medians of one side; null where a run did not reach the threshold."""
    steps = [times.reached(threshold) for times in run_times]
    reached = [(times, step) for times, step in zip(run_times, steps, strict=True) if step is not None]
    whole = [times.ends[step - 1] - times.started for times, step in reached]
    learning = [times.ends[step - 1] - times.begun for times, step in reached]
    complete = len(reached) == len(run_times)
    return {
        "seconds_from_start": rounded(median(whole)) if complete else None,
        "seconds_from_first_step": rounded(median(learning)) if complete else None,
        "start_seconds": rounded(median(times.begun - times.started for times in run_times)),
        "seconds_per_step": rounded(median(times.step_s for times in run_times)),
        "steps_needed": steps,
        "final_reward": rounded(median(sum(times.rewards[-WINDOW:]) / WINDOW for times in run_times)),
    }


def report(run_times: dict[str, list[RunTimes]], scale: Scale) -> None:
    """Print the figures, those of the faster setting of each side."""
    sides = {side: summary(runs, scale.threshold) for side, runs in run_times.items()}
    starling, trl = (
        min((side for side in sides if side.startswith(name)), key=lambda side: float(sides[side]["seconds_per_step"]))
        for name in ("starling_", "trl_")
    )
    detail = {
        "sides": sides,
        "compared": [starling, trl],
        "threshold": scale.threshold,
        "rounds": scale.rounds,
        "steps": scale.num_steps,
        "sequences_per_step": PROMPTS_PER_STEP * GROUP_SIZE,
        "max_tokens": MAX_TOKENS,
        **OPTIMIZER,
        **machine(),
        "versions": {
            **versions("torch", "transformers", "pyzmq"),
            "trl": [line for line in REQUIREMENTS.read_text().splitlines() if not line.startswith("#")],
        },
    }
    for figure, key, goal in (
        ("seconds_to_reward_over_trl", "seconds_from_start", 0.5),
        ("seconds_to_reward_after_start_over_trl", "seconds_from_first_step", 0.4),
        ("seconds_per_step_over_trl", "seconds_per_step", None),
    ):
        ours, theirs = sides[starling][key], sides[trl][key]
        shown: dict[str, Any] = detail if goal and key == "seconds_from_start" else {"see": "above"}
        if ours is None or theirs is None:
            shown = {"reason": f"a run did not reach {scale.threshold} in {scale.num_steps} steps", **shown}
        value = None if ours is None or theirs is None else ours / theirs
        print_figure("loop", figure, value, unit="ratio", goal=goal, better="lower", detail=shown)
    start_s = sides[starling]["start_seconds"]
    print_figure("loop", "start_to_first_step_s", start_s, unit="s", goal=3.5, better="lower", detail={"see": "above"})


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round; under a minute once all is prepared")
    parser.add_argument("--rounds", type=int, help="how often each side runs")
    arguments = parser.parse_args()
    scale = QUICK if arguments.quick else FULL
    if arguments.rounds:
        scale = replace(scale, rounds=arguments.rounds)
    report(measure(scale), scale)


if __name__ == "__main__":
    main()
