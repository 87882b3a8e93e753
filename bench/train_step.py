"""Tokens per second of one training step: Starling's trainers side by side with Hugging Face's, on the CPU.

    python bench/train_step.py [--quick]

Both sides train the same model in single precision on the same sequences of ragged lengths, with one thread, the same
loss (mean over all response tokens), the same AdamW, one update per step. Theirs is TRL 1.16: `SFTTrainer` (which is
`transformers.Trainer` with its collator) and `GRPOTrainer`'s loss on prepared samples; both pad, since their packing
needs an attention kernel for GPUs. Each is tried with microbatches of several sizes, and its fastest counts. Ours packs
rows under a token budget, computes a prompt once for completions that share it, and leaves out the logits that nothing
is learnt from. Prompts of GRPO are shorter than their completions, or ten times as long. The sides run alternately;
figures are ratios of medians of processor time. First both train a step from the same weights: their losses and
gradient norms must be equal, or nothing is measured.

A GPU's figures, with the share of its peak that is reached (MFU), are in docs/performance.md when they were taken.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from environment import environment_python
from figure import machine, print_figure, progress, rounded, versions

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE / "trl-requirements.txt"
ANSWER_TIMEOUT_S = 300.0
LEARNING_RATE, CLIP = 1e-4, 0.2
MODEL: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Scale:
    """Size of the measurement."""

    rounds: int
    num_examples: int
    num_groups: int
    group_size: int


FULL = Scale(7, 64, 8, 8)
QUICK = Scale(3, 16, 3, 4)


def write_work(folder: Path, scale: Scale) -> None:
    """Write the model and the sequences that both sides train."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3Config(**MODEL)).save_pretrained(folder / "model")
    generator = np.random.default_rng(0)

    def lengths(count: int, most: int) -> Any:
        return np.clip(generator.lognormal(np.log(most / 6), 0.9, size=count), 4, most).astype(int)

    def tokens(length: int) -> list[int]:
        return [int(token) for token in generator.integers(1, MODEL["vocab_size"], size=length)]

    prompts, answers = lengths(scale.num_examples, 300), lengths(scale.num_examples, 700)
    sft = [{"prompt": tokens(p), "response": tokens(r)} for p, r in zip(prompts, answers, strict=True)]

    def group(prompt: int | None, most: int) -> dict[str, Any]:
        """Return completions of up to `most` tokens of a prompt, by default of ten times their mean length."""
        completions = [tokens(length) for length in lengths(scale.group_size, most)]
        if prompt is None:
            prompt = 10 * sum(map(len, completions)) // len(completions)
        rewards = generator.standard_normal(scale.group_size)
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
        logprobs = [(-9.0 + 0.1 * generator.standard_normal(len(ids))).tolist() for ids in completions]
        return {
            "prompt": tokens(prompt),
            "completions": completions,
            "rewards": rewards.tolist(),
            "advantages": advantages.tolist(),
            "logprobs": logprobs,
        }

    grpo = [group(prompt, 700) for prompt in lengths(scale.num_groups, 300)]
    grpo_long_prompts = [group(None, 240) for _ in range(scale.num_groups)]
    work = {
        "sft": sft,
        "grpo": grpo,
        "grpo_long_prompts": grpo_long_prompts,
        "learning_rate": LEARNING_RATE,
        "clip": CLIP,
    }
    (folder / "work.json").write_text(json.dumps(work))


# --- the two sides ---------------------------------------------------------------------------------------------------


def ours(folder: Path) -> dict[str, Callable[[], dict[str, float]]]:
    """Return functions that train one step of each kind with Starling's trainers."""
    import torch

    from starling.policy.settings.algorithm import AlgorithmSettings
    from starling.policy.settings.optimizer import OptimizerSettings
    from starling.policy.settings.policy import PolicySettings
    from starling.policy.settings.supervised import SftStepSettings
    from starling.policy.train.data.examples import SftExample
    from starling.policy.train.data.groups import ScoredGroup
    from starling.policy.train.model.load import load_model
    from starling.policy.train.rl import RlTrainer
    from starling.policy.train.sft import SftTrainer

    torch.set_num_threads(1)
    work = json.loads((folder / "work.json").read_text())
    optimizer = OptimizerSettings(learning_rate=LEARNING_RATE)
    algorithm = AlgorithmSettings(aggregate="token_mean", clip_low=CLIP, clip_high=CLIP, skip_zero_advantage=False)
    settings = PolicySettings(optimizer=optimizer, sft=SftStepSettings(optimizer=optimizer), algorithm=algorithm)
    sft = SftTrainer(load_model(folder / "model"), settings, total_steps=1000)
    rl, long_rl = (RlTrainer(load_model(folder / "model"), settings, total_steps=1000) for _ in range(2))
    examples = [
        SftExample(np.array(one["prompt"], np.int32), np.array(one["response"], np.int32)) for one in work["sft"]
    ]

    def group(one: dict[str, Any]) -> ScoredGroup:
        ids = np.concatenate(one["completions"]).astype(np.int32)
        lengths = tuple(len(completion) for completion in one["completions"])
        logprobs = np.concatenate(one["logprobs"]).astype(np.float32)
        prompt = np.array(one["prompt"], np.int32)
        return ScoredGroup(prompt, ids, logprobs, np.zeros_like(ids), lengths, tuple(one["rewards"]))

    groups, long_prompts = ([group(one) for one in work[kind]] for kind in ("grpo", "grpo_long_prompts"))
    return {
        "sft": lambda: sft.step(examples),
        "grpo": lambda: rl.step(groups, step=1),
        "grpo_long_prompts": lambda: long_rl.step(long_prompts, step=1),
    }


class Theirs:
    """A process in TRL's environment that trains a step on request."""

    def __init__(self, python: Path, folder: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._log = (folder / "trl.log").open("w+")
        self._process = subprocess.Popen(
            [str(python), str(HERE / "train_step_trl.py"), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )

    def step(self, kind: str, size: int) -> dict[str, float]:
        """Make one step of `kind` with microbatches of `size` sequences."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"kind": kind, "size": size}) + "\n")
        self._process.stdin.flush()
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                told: dict[str, float] = json.loads(line)
                return told
        self._log.seek(0)
        raise SystemExit(f"TRL's side ended:\n{self._log.read()[-4000:]}")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(ANSWER_TIMEOUT_S)
        self._log.close()


SIZES = (2, 4, 8, 16)
GOALS = {"sft": 2.2, "grpo": 2.0, "grpo_long_prompts": 4.0}


def measure(scale: Scale) -> None:
    """Measure both kinds of step, and print the figures."""
    python = environment_python("trl", REQUIREMENTS, torch=True)
    with tempfile.TemporaryDirectory(prefix="starling-step-") as temporary:
        folder = Path(temporary)
        write_work(folder, scale)
        steps, theirs = ours(folder), Theirs(python, folder)
        for kind, step in steps.items():
            one, other = step(), theirs.step(kind, SIZES[0])
            for name in ("loss", "grad_norm"):
                if abs(one[name] - other[name]) > 1e-3 * abs(other[name]) + 1e-6:
                    raise SystemExit(f"{kind}: {name} is {one[name]} here and {other[name]} there: not the same step")
            seconds: dict[str, list[float]] = {}
            for number in range(scale.rounds):
                begin = time.process_time()
                metrics = step()
                seconds.setdefault("ours", []).append(time.process_time() - begin)
                for size in SIZES:
                    seconds.setdefault(f"trl_{size}", []).append(theirs.step(kind, size)["seconds"])
                progress(f"{kind}, round {number + 1} of {scale.rounds}")
            medians = {side: median(values) for side, values in seconds.items()}
            best = min((side for side in medians if side != "ours"), key=medians.__getitem__)
            print_figure(
                "train_step",
                f"{kind}_tokens_per_s_over_trl",
                medians[best] / medians["ours"],
                unit="ratio",
                goal=GOALS[kind],
                better="higher",
                detail={
                    "seconds": {side: rounded(value) for side, value in medians.items()},
                    "tokens_per_s": rounded(metrics["num_tokens"] / medians["ours"]),
                    "response_tokens": metrics["num_tokens"],
                    "sequences": metrics["num_sequences"],
                    "padding_waste": rounded(metrics["padding_waste"]),
                    "loss": [rounded(one["loss"], 6), rounded(other["loss"], 6)],
                    "grad_norm": [rounded(one["grad_norm"], 6), rounded(other["grad_norm"], 6)],
                    "compared_with": best,
                    **machine(),
                    "versions": versions("torch", "transformers"),
                },
            )
        theirs.close()


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sequences and rounds")
    measure(QUICK if parser.parse_args().quick else FULL)


if __name__ == "__main__":
    main()
