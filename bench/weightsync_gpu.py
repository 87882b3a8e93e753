"""Weights of a GPU: what a publication costs training, and how fast they arrive, over a copy within the device.

    python bench/weightsync_gpu.py [--quick]

Weights of 4 GiB (bfloat16, 64 tensors) are published by each policy of snapshots and pulled in place into other tensors
of the same device by each transport; `local` copies within the device, where the version stays, and `ucx` and `nixl`
send from there. Every ratio is to the time of copying the same tensors on the device, measured in the same round: of
the seconds that `snapshot` takes from training, and of the seconds of a pull, which contain digests. Five rounds after
a warm-up; a figure is the ratio of medians. Without a CUDA device each figure is null. `--quick` is the same with
32 MiB on whatever device there is, to see that it works.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from statistics import median
from typing import Final

import torch
from figure import machine, print_figure, progress, rounded, versions

from starling.weightsync.memory.device_memory import SnapshotPlace
from starling.weightsync.offers.offer import Transport
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.puller.puller import Puller
from starling.weightsync.tensors.modules import layout_of
from starling.weightsync.transports.nixl.agent import has_nixl
from starling.weightsync.transports.ucx.worker import has_ucx

BENCH: Final = "weightsync_gpu"
NUM_TENSORS: Final = 64
ROUNDS: Final = 5
DEADLINE_S: Final = 120.0
POLICIES: Final[tuple[SnapshotPlace, ...]] = ("device", "pinned", "host")


def transports() -> tuple[Transport, ...]:
    """Return the transports that can be used within one process here."""
    ucx: tuple[Transport, ...] = ("ucx",) if has_ucx() else ()
    nixl: tuple[Transport, ...] = ("nixl",) if has_nixl() else ()
    return ("local", "tcp", *ucx, *nixl)


def timed(device: str, begin: float) -> float:
    """Return the seconds since `begin`, after all work of the device."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def copy_s(device: str, source: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> float:
    """Return how long it takes to copy all tensors within the device."""
    timed(device, 0.0)
    begin = time.perf_counter()
    for name, tensor in source.items():
        target[name].copy_(tensor)
    return timed(device, begin)


def measure(
    device: str, size_bytes: int, policy: SnapshotPlace, transport: Transport
) -> tuple[dict[str, list[float]], tuple[str, ...]]:
    """Return the seconds of each round, of `copy`, of the `snapshot` and of the `pull`; and the lanes of the pull."""
    shape = (size_bytes // 2 // NUM_TENSORS // 1024, 1024)
    source = {f"w{index}": torch.randn(shape, device=device).bfloat16() for index in range(NUM_TENSORS)}
    target = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    wanted, seconds = layout_of(target, "rollout-0"), defaultdict[str, list[float]](list)
    puller = Puller(wanted)
    with Publisher(layout_of(source, "policy-0"), transport=transport, snapshots=policy, delta_versions=0) as publisher:
        plan = make_plan(publisher.layout, wanted)
        for version in range(ROUNDS + 1):
            copied = copy_s(device, source, target)
            begin = time.perf_counter()
            published = publisher.snapshot(version, source)
            snapshot = timed(device, begin) if policy == "device" else time.perf_counter() - begin
            offer = published.offer()
            begin = time.perf_counter()
            report = puller.pull(offer, plan, deadline_s=DEADLINE_S, into=target)
            pulled = timed(device, begin)
            if version:
                for name, value in (("copy", copied), ("snapshot", snapshot), ("pull", pulled)):
                    seconds[name].append(value)
        assert all(torch.equal(target[name], source[name]) for name in source)
    puller.close()
    return seconds, report.lanes


def show(figure: str, part: str, seconds: dict[str, list[float]] | None, detail: dict[str, object]) -> None:
    """Print a ratio of medians, or null."""
    value = None if seconds is None else median(seconds["copy"]) / median(seconds[part])
    medians = {} if seconds is None else {f"{name}_s": rounded(median(each)) for name, each in seconds.items()}
    print_figure(BENCH, figure, value, unit="ratio", goal=None, better="higher", detail={**medians, **detail})


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="32 MiB, on whatever device there is")
    quick: bool = parser.parse_args().quick
    has_gpu = torch.cuda.is_available()
    device, size = "cuda" if has_gpu else "cpu", (32 << 20) if quick else (4 << 30)
    detail: dict[str, object] = {"size_bytes": size, **machine(), "versions": versions("torch")}
    detail["device"] = torch.cuda.get_device_name() if has_gpu else device
    runs = quick or has_gpu
    if not runs:
        detail["reason"] = "there is no CUDA device"
    for policy in POLICIES:
        progress(f"snapshots: {policy}")
        seconds, _ = measure(device, size, policy, "local") if runs else (None, ())
        show(f"snapshot_{policy}_over_device_copy", "snapshot", seconds, detail)
    for transport in transports():
        progress(f"pull: {transport}")
        seconds, lanes = measure(device, size, "device", transport) if runs else (None, ())
        show(f"pull_{transport}_over_device_copy", "pull", seconds, {**detail, "lanes": lanes})


if __name__ == "__main__":
    main()
