"""Planning time and memory for a trillion parameters, and the estimated transfer time.

    OMP_NUM_THREADS=1 python bench/weightsync_plan.py [--quick]

The model has 61 layers, 384 experts, a hidden size of 7168 and experts of 2048 (Kimi K2). The source has 256 ranks,
with FSDP alone or with expert parallelism; the destinations are 16 replicas of 8 ranks with tensor parallelism. Each
case runs in a process of its own, on one core, from the configuration to the encoded plan of one replica; and for all
128 ranks as one destination, without relays. Figures: seconds and peak memory of the slowest case, and the size of the
largest plan.

Last, the estimate for the setting in which Perplexity report 1.3 s: 1T parameters from 256 GPUs in bfloat16 to 128 in
FP8, with a 400 Gbit/s card per GPU. The number of replicas on their 128 GPUs is not published, but it is decisive: a
replica of n GPUs takes at least 1 TB / n / 50 GB/s. So the estimate is made for several n, and none of them is a
comparison. It assumes the full rate of the cards, and excludes the computation of FP8 and its scales.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from statistics import median
from typing import Any

from figure import machine, print_figure, progress, rounded, versions

MODEL = "kimi-k2"
SOURCES = ("fsdp256", "ep64 fsdp4")
PERPLEXITY_S = 1.3
DESTINATIONS = ("tp8 x16", "tep16 x8", "tep32 x4", "tep64 x2")


def measure(source: str, destination: str, *, relays: bool) -> dict[str, Any]:
    """Plan in this process; return seconds, peak memory in bytes, and sizes."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    from starling.weightsync.layouts.presets import PRESETS
    from starling.weightsync.layouts.symbolic import compact_layout, model_layout
    from starling.weightsync.plan.layout import encode
    from starling.weightsync.plan.planner import decode_plan, make_plan

    begin = time.perf_counter()
    config = PRESETS[MODEL]
    held = compact_layout(model_layout(config, source, dtype="bfloat16"), "policy-0")
    destination_layout = compact_layout(
        model_layout(config, destination if relays else flat(destination), dtype="bfloat16"), "r-0"
    )
    described = time.perf_counter()
    plan = make_plan(held, destination_layout)
    planned = time.perf_counter()
    data = encode(plan)
    part = encode(plan.of_rank(0))
    encoded = time.perf_counter()
    decode_plan(data)
    decoded = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    buckets = plan.expanded(0)
    expanded = time.perf_counter()
    return {
        "source": source,
        "destination": destination if relays else flat(destination),
        "seconds": encoded - begin,
        "describe_s": described - begin,
        "plan_s": planned - described,
        "encode_s": encoded - planned,
        "decode_s": decoded - encoded,
        "expand_one_rank_s": expanded - decoded,
        "transfers_of_one_rank": len(buckets.rows.part),
        "peak_rss_bytes": peak * 1024,
        "peak_rss_at_one_rank_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "plan_bytes": len(data),
        "plan_of_one_rank_bytes": len(part),
        "num_classes": len(plan.moves),
        "total_bytes": plan.total_bytes,
    }


def flat(destination: str) -> str:
    """Return a parallelism of several replicas as one with copies."""
    words = destination.split()
    return " ".join(f"dp{word[1:]}" if word[0] == "x" else word for word in sorted(words, key=lambda w: w[0] != "x"))


def measured(source: str, destination: str, *, relays: bool) -> dict[str, Any]:
    """Return what `measure` finds in a process of its own; memory is that of the whole process, before expansion."""
    command = [sys.executable, __file__, "--case", source, destination, "relays" if relays else "all"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def predict() -> dict[str, Any]:
    """Return the predicted seconds by destination, for FP8 from 256 ranks."""
    from starling.cli.plan.forecast import forecast_sync
    from starling.weightsync.layouts.presets import PRESETS

    found: dict[str, Any] = {}
    for destination in DESTINATIONS:
        outlook = forecast_sync("ep64 fsdp4", destination, config=PRESETS[MODEL], dtype="float8_e4m3fn")
        found[destination] = {
            "seconds": rounded(outlook.estimate.seconds),
            "publisher_bytes": outlook.estimate.publisher_bytes,
            "busiest_link_bytes": outlook.estimate.links[0].num_bytes,
        }
    return found


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="each case once instead of five times")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        source, destination, kind = arguments.case
        print(json.dumps(measure(source, destination, relays=kind == "relays")))
        return
    cases: list[dict[str, Any]] = []
    for source in SOURCES:
        for relays in (True, False):
            progress(f"{source} -> {DESTINATIONS[0]}{' with relays' if relays else ', every rank from the source'}")
            runs = [measured(source, DESTINATIONS[0], relays=relays) for _ in range(1 if arguments.quick else 5)]
            case = {
                **runs[0],
                **{name: rounded(median(run[name] for run in runs)) for name in runs[0] if name[-2:] == "_s"},
            }
            case["seconds"] = rounded(median(run["seconds"] for run in runs))
            case["peak_rss_bytes"] = max(run["peak_rss_bytes"] for run in runs)
            cases.append(case)
    detail = {"model": MODEL, "cases": cases, "versions": versions("numpy", "msgspec"), "machine": machine()}
    for figure, name, unit, goal in (
        ("trillion_plan_seconds", "seconds", "s", 10.0),
        ("trillion_plan_peak_memory", "peak_rss_bytes", "bytes", 2e9),
        ("trillion_plan_size", "plan_bytes", "bytes", 50e6),
    ):
        worst = max(case[name] for case in cases)
        print_figure("weightsync_plan", figure, worst, unit=unit, goal=goal, better="lower", detail=detail)
    progress("predicting")
    predicted = predict()
    for destination, found in predicted.items():
        print_figure(
            "weightsync_plan",
            f"predicted_over_perplexity_{destination.replace(' ', '_')}",
            found["seconds"] / PERPLEXITY_S,
            unit="ratio",
            goal=None,
            better="lower",
            detail={"measured_by_perplexity_s": PERPLEXITY_S, **found},
        )


if __name__ == "__main__":
    main()
