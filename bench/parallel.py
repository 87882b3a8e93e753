"""What the ranks of a mesh send for a step, beside the formula, and how a model scales by those formulas.

    python bench/parallel.py [--quick] [--picture FILE]

Traffic: small models on meshes of two or four processes, connected by gloo. Each collective that torch dispatches is
counted, with the bytes that the algorithm that sends the least would send; the ratio to the formula of
`starling.policy.plan.traffic` is a figure for each axis, the worst of its meshes. At 1.00 nothing is sent twice.

Scaling: the best mesh for 8 to 1024 GPUs by the model of `starling.policy.plan.proposals`, with 8,192 tokens per GPU
and step in microbatches of 4,096, on H100s as `Hardware` states them. The figure is a rank's speed at 1024 GPUs over
that at 8, or at the fewest that the model fits on; it was not measured on GPUs. `--picture` draws it (SVG or PNG, needs
matplotlib). `--quick` is the same.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "parallel"))
os.environ["OMP_NUM_THREADS"] = "1"

from figure import machine, print_figure, progress, rounded, versions
from mesh_traffic import EACH_AXIS, PAIRS, traffic_ratios

from starling.common.errors import ConfigError
from starling.policy.plan.proposals import Hardware, Proposal, StepSize, propose, written
from starling.policy.plan.sizes import model_sizes
from starling.policy.settings.parallel import ParallelSettings
from starling.weightsync.layouts.presets import PRESETS

GOAL = 1.05
SCALED = ("qwen3-0.6b", "qwen3-8b", "llama-3.1-70b")
NUMS_OF_GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
TOKENS_PER_GPU = 1 << 13
MICROBATCH_TOKENS = 1 << 12


def measure_traffic() -> None:
    """Print the ratio of what was sent to the formula, for each axis."""
    worst: dict[str, tuple[float, dict[str, Any]]] = {}
    for name, parallel in (*EACH_AXIS, *PAIRS):
        mesh = written(ParallelSettings(**parallel))
        for ratios in traffic_ratios(name, parallel):
            for axis, ratio in ratios.items():
                if axis not in worst or ratio > worst[axis][0]:
                    worst[axis] = ratio, {"model": name, "mesh": mesh}
        progress(f"{name} on {mesh}")
    for axis, (ratio, detail) in worst.items():
        print_figure(
            "parallel",
            f"bytes_over_formula_{axis}",
            ratio,
            unit="ratio",
            goal=GOAL,
            better="lower",
            detail={**detail, **machine(), **versions("torch")},
        )


def model_scaling() -> dict[str, list[Proposal]]:
    """Print the modelled efficiency of each model; return its best mesh for each number of GPUs that it fits on."""
    found: dict[str, list[Proposal]] = {}
    for name in SCALED:
        sizes = model_sizes(PRESETS[name])
        for num_gpus in NUMS_OF_GPUS:
            step = StepSize(num_gpus * TOKENS_PER_GPU, MICROBATCH_TOKENS, MICROBATCH_TOKENS)
            try:
                found.setdefault(name, []).append(propose(sizes, num_gpus, step, Hardware())[0])
            except ConfigError:
                progress(f"{name} does not fit on {num_gpus} GPUs")
    for name, proposals in found.items():
        rows = [
            {
                "gpus": one.parallel.num_ranks,
                "mesh": written(one.parallel),
                "tokens_per_s_and_gpu": rounded(one.tokens_per_s),
                "memory_gb": rounded(one.memory.total / 1e9),
                "waiting_share": rounded(one.waiting_s / one.seconds),
            }
            for one in proposals
        ]
        print_figure(
            "parallel",
            f"modelled_efficiency_{name}",
            proposals[-1].tokens_per_s / proposals[0].tokens_per_s,
            unit="ratio",
            goal=None,
            better="higher",
            detail={"rows": rows, "tokens_per_gpu": TOKENS_PER_GPU},
        )
    return found


def draw(found: dict[str, list[Proposal]], path: Path) -> None:
    """Draw the modelled speed of a GPU against the number of GPUs, relative to the fewest."""
    import matplotlib as mpl

    mpl.use("svg" if path.suffix == ".svg" else "agg")
    from matplotlib import pyplot

    mpl.rcParams["svg.hashsalt"] = "starling"
    figure, axes = pyplot.subplots(figsize=(6, 3.5))
    for name, proposals in found.items():
        speeds = [one.tokens_per_s / proposals[0].tokens_per_s for one in proposals]
        axes.plot([one.parallel.num_ranks for one in proposals], speeds, marker="o", label=name)
    axes.set(xscale="log", xlabel="GPUs", ylabel="speed of a GPU", ylim=(0, 1.2), xticks=NUMS_OF_GPUS)
    axes.set_xticklabels(NUMS_OF_GPUS)
    axes.minorticks_off()
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the same")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the scaling")
    arguments = parser.parse_args()
    measure_traffic()
    found = model_scaling()
    if arguments.picture is not None:
        draw(found, arguments.picture)


if __name__ == "__main__":
    main()
