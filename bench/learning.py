"""Whether algorithms learn from stale samples: the quickstart's task, by algorithm and staleness, as curves.

    python bench/learning.py [--quick] [--picture FILE.png]

Every run begins with the same weights, made here by a short supervised run: the quickstart's small Qwen3, which then
mostly spells backward the words that it has seen. Each step samples 16 groups of 16 completions with the weights of
exactly `staleness` versions ago and trains them with the policy's own trainer; engine, scorer, trainer and settings are
those that the services use, in one process per run, so that nothing but the staleness decides the age of a sample.

Decoupled PPO makes four updates of a step, for with one its ratio is always 1 and its clip never acts. Each has half of
the learning rate: of a quarter of the batch that is what Adam takes to the same end (the square root rule,
arXiv:2205.10287), so that all algorithms move about as far in a step. How far the weights move within the versions that
a sample is late decides what becomes of it, before any algorithm does: at a staleness of 8, GRPO at four times the rate
collapses, and four updates at the whole rate fall back for 30 steps, whether GRPO or decoupled PPO makes them.

A run *collapses* when the mean reward of its last steps falls below half of the best that it had before, or below what
it began with. Curves are means over seeds; the picture shows all of them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from environment import CACHE
from figure import machine, print_figure, progress, rounded, versions

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo", "aggregate": "token_mean"},
    "dapo": {"name": "dapo"},
    "gspo": {"name": "gspo"},
    "aipo": {"name": "aipo"},
    "decoupled_ppo": {"name": "decoupled_ppo", "num_minibatches": 4},
}
STALENESS = (0, 2, 8)
WINDOW = 20
MAX_TOKENS, PROMPTS_PER_STEP, GROUP_SIZE = 10, 16, 16
RUN_TIMEOUT_S = 1200.0


@dataclass(frozen=True)
class Scale:
    """Size of the measurement."""

    algorithms: tuple[str, ...]
    seeds: int
    num_steps: int


FULL = Scale(tuple(ALGORITHMS), 3, 150)
QUICK = Scale(("grpo", "aipo"), 1, 30)


# --- one run ---------------------------------------------------------------------------------------------------------


def prepare() -> Path:
    """Return the cached checkpoint from which all runs start; create it on the first call."""
    recipe = Path(__file__).resolve().parent.parent / "recipes" / "quickstart.toml"
    folder = CACHE / f"learning-{abs(hash_of(recipe.read_bytes())):x}"
    if not folder.exists():
        progress("making the checkpoint that all runs begin with")
        with tempfile.TemporaryDirectory(prefix="starling-learning-") as temporary:
            command = [str(Path(sys.executable).with_name("starling")), "run", str(recipe)]
            flags = ["--run.folder", temporary, "--run.kind", "sft", "--launch.screen", "plain"]
            flags += ["--evaluation.at-start", "false", "--evaluation.at-end", "false"]
            done = subprocess.run(
                [*command, *flags], capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False
            )
            if done.returncode:
                raise SystemExit(f"the supervised run failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
            attempt = Path(temporary) / "quickstart" / "attempt-1"
            made = max((attempt / "checkpoints").iterdir(), key=lambda path: int(path.name.removeprefix("step-")))
            folder.parent.mkdir(parents=True, exist_ok=True)
            made.rename(folder) if made.stat().st_dev == folder.parent.stat().st_dev else _copy(made, folder)
    return folder


def hash_of(content: bytes) -> int:
    """Return a number that changes with `content`."""
    import hashlib

    return int(hashlib.sha256(content).hexdigest()[:10], 16)


def _copy(source: Path, target: Path) -> None:
    import shutil

    shutil.copytree(source, target)


def learn(checkpoint: Path, algorithm: str, staleness: int, seed: int, num_steps: int) -> list[float]:
    """Train once; return the mean reward of each step's samples."""
    import torch
    from transformers import AutoTokenizer

    from starling.cli.recipe.schema import load_recipe
    from starling.controller.data.prompts import load_prompts
    from starling.policy.settings.algorithm import AlgorithmSettings
    from starling.policy.train.model.load import load_model, version_tensors
    from starling.policy.train.rl import RlTrainer
    from starling.rollout.engine.embedded.engine import TransformersEngine
    from starling.rollout.engine.embedded.model import build_model
    from starling.rollout.engine.model_config import end_token_ids

    torch.set_num_threads(1)
    recipe = load_recipe([Path(__file__).resolve().parent.parent / "recipes" / "quickstart.toml"], [])
    chosen = AlgorithmSettings(**ALGORITHMS[algorithm])
    rate = recipe.policy.optimizer.learning_rate / math.sqrt(chosen.num_minibatches)
    optimizer = recipe.policy.optimizer.model_copy(update={"learning_rate": rate})
    settings = recipe.policy.model_copy(update={"algorithm": chosen, "optimizer": optimizer})
    tokenizer, prompts = AutoTokenizer.from_pretrained(checkpoint), load_prompts(recipe.data)
    policy = load_model(checkpoint)
    trainer = RlTrainer(policy, settings, total_steps=num_steps)
    engine = TransformersEngine(
        build_model(checkpoint, dtype="float32", device="cpu", weights=True),
        eos_token_ids=end_token_ids(tokenizer, checkpoint),
        max_rows=PROMPTS_PER_STEP * GROUP_SIZE,
    )
    kept: deque[tuple[int, dict[str, Any]]] = deque(maxlen=staleness + 1)
    rewards, first = [], seed * num_steps * PROMPTS_PER_STEP
    for step in range(1, num_steps + 1):
        kept.append((step - 1, {name: tensor.clone() for name, tensor in version_tensors(policy).items()}))
        version, weights = kept[0]
        for name, tensor in engine.tensors().items():
            tensor.copy_(weights[name])
        engine.set_version(version)
        asked = [prompts.prompt(first + (step - 1) * PROMPTS_PER_STEP + index) for index in range(PROMPTS_PER_STEP)]
        sampling = recipe.sampling.model_copy(update={"max_tokens": MAX_TOKENS}).to_wire()
        groups = sampled(engine, tokenizer, asked, sampling, seed, step)
        rewards.append(trainer.step(groups, step=step)["reward_mean"])
    return rewards


def sampled(engine: Any, tokenizer: Any, asked: list[Any], sampling: Any, seed: int, step: int) -> list[Any]:
    """Sample a group of completions of each prompt, and score them."""
    import msgspec
    import numpy as np

    from starling.algo.text import decode, encode_prompt
    from starling.controller.core.plan import draw_seed
    from starling.policy.train.data.groups import ScoredGroup
    from starling.reward.score.scorers.registry import resolve_scorer
    from starling.rollout.engine.base import GroupRequest, GroupResult

    for index, prompt in enumerate(asked):
        drawn = draw_seed(seed, "train", step * PROMPTS_PER_STEP + index, 0)
        own = msgspec.structs.replace(sampling, seed=drawn)
        engine.add(GroupRequest(str(index), encode_prompt(tokenizer, prompt), GROUP_SIZE, own))
    results: dict[str, GroupResult] = {}
    while len(results) < len(asked):
        for result in engine.step():
            assert isinstance(result, GroupResult), result
            results[result.lease] = result
    score, groups = resolve_scorer("exact_match", {}), []
    for index, prompt in enumerate(asked):
        completions = results[str(index)].completions
        texts = [decode(tokenizer, completion.token_ids.tolist()) for completion in completions]
        found = tuple(float(score(text, prompt.reference, prompt.text, prompt.metadata)) for text in texts)
        ids, logprobs, made_by = (
            np.concatenate([getattr(completion, name) for completion in completions])
            for name in ("token_ids", "logprobs", "versions")
        )
        lengths = tuple(len(completion.token_ids) for completion in completions)
        groups.append(ScoredGroup(results[str(index)].prompt_ids, ids, logprobs, made_by, lengths, found, prompt.id))
    return groups


# --- all runs --------------------------------------------------------------------------------------------------------


def measure(scale: Scale) -> dict[tuple[str, int], list[list[float]]]:
    """Return the curves of each algorithm at each staleness, one per seed; a run on each core at a time."""
    checkpoint = prepare()
    cases = [
        (name, staleness, seed) for seed in range(scale.seeds) for name in scale.algorithms for staleness in STALENESS
    ]

    def run(case: tuple[str, int, int]) -> list[float]:
        name, staleness, seed = case
        begin = time.monotonic()
        command = [sys.executable, __file__, "--one", str(checkpoint), name, str(staleness), str(seed)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [*command, str(scale.num_steps)],
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
            env=environment,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{case} failed:\n{done.stderr[-3000:]}")
        curve: list[float] = json.loads(done.stdout.splitlines()[-1])
        progress(
            f"{name}, staleness {staleness}, seed {seed}: {fmean(curve[:5]):.3f} -> {fmean(curve[-WINDOW:]):.3f} "
            f"({time.monotonic() - begin:.0f} s)"
        )
        return curve

    curves: dict[tuple[str, int], list[list[float]]] = {}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for (name, staleness, _), curve in zip(cases, pool.map(run, cases), strict=True):
            curves.setdefault((name, staleness), []).append(curve)
    return curves


def smooth(curve: list[float]) -> list[float]:
    """Return the mean of each step and the `WINDOW` - 1 before it."""
    return [fmean(curve[max(0, end - WINDOW) : end]) for end in range(1, len(curve) + 1)]


def collapsed(curve: list[float]) -> bool:
    """Whether the reward collapsed."""
    course = smooth(curve)
    return course[-1] < 0.5 * max(course) or course[-1] < fmean(curve[:5]) - 0.02


def report(curves: dict[tuple[str, int], list[list[float]]], scale: Scale, picture: Path | None) -> None:
    """Print the figures, and draw the curves."""
    final = {
        f"{name}, staleness {staleness}": [rounded(smooth(curve)[-1], 3) for curve in runs]
        for (name, staleness), runs in curves.items()
    }
    fell = {f"{name}, staleness {staleness}": sum(map(collapsed, runs)) for (name, staleness), runs in curves.items()}
    detail = {
        "final_reward": final,
        "collapsed": fell,
        "first_reward": rounded(fmean(curve[0] for runs in curves.values() for curve in runs), 3),
        "seeds": scale.seeds,
        "steps": scale.num_steps,
        "completions_per_step": PROMPTS_PER_STEP * GROUP_SIZE,
        **machine(),
        "versions": versions("torch", "transformers"),
    }
    bad = sum(count for key, count in fell.items() if key.endswith((" 0", " 2")))
    print_figure("learning", "collapsed_at_staleness_up_to_2", bad, unit="runs", goal=0, better="lower", detail=detail)
    for (name, staleness), runs in curves.items():
        figure, value = f"reward_{name}_staleness_{staleness}", fmean(smooth(curve)[-1] for curve in runs)
        see = {"see": "above"}
        print_figure("learning", figure, value, unit="reward", goal=None, better="higher", detail=see)
    for name in ("aipo", "decoupled_ppo"):
        if (name, 8) in curves:
            value = fmean(smooth(curve)[-1] for curve in curves[name, 8])
            fresh = fmean(smooth(curve)[-1] for curve in curves[name, 0])
            print_figure(
                "learning",
                f"{name}_reward_at_staleness_8_over_0",
                value / fresh,
                unit="ratio",
                goal=0.8,
                better="higher",
                detail={"see": "above"},
            )
    if picture is not None:
        draw(curves, picture)


def draw(curves: dict[tuple[str, int], list[list[float]]], picture: Path) -> None:
    """Draw one panel per staleness: thin lines are seeds, thick ones their means."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(STALENESS), figsize=(12, 4), sharey=True)
    for panel, staleness in zip(panels, STALENESS, strict=True):
        for number, name in enumerate(dict.fromkeys(name for name, _ in curves)):
            runs = [smooth(curve) for curve in curves[name, staleness]]
            for run in runs:
                panel.plot(run, color=f"C{number}", linewidth=0.5, alpha=0.4)
            panel.plot([fmean(values) for values in zip(*runs, strict=True)], color=f"C{number}", label=name)
        panel.set_title(f"staleness {staleness}")
        panel.set_xlabel("step")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel(f"reward, mean of {WINDOW} steps")
    panels[0].legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two algorithms, one seed, few steps")
    parser.add_argument("--picture", type=Path, help="where to draw the curves")
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        checkpoint, name, *numbers = arguments.one
        print(json.dumps(learn(Path(checkpoint), name, *map(int, numbers))))
        return
    scale = QUICK if arguments.quick else FULL
    report(measure(scale), scale, arguments.picture)


if __name__ == "__main__":
    main()
