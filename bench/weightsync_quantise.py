"""Cost of quantising at the source, by format, relative to the plain copy into the snapshot.

    OMP_NUM_THREADS=1 python bench/weightsync_quantise.py [--quick]

A bf16 weight that one rank holds whole is quantised into a snapshot (maxima and codes) as in `Publisher.snapshot`, and
copied into one, alternating. Times are CPU seconds of the thread (other processes still slow memory down, for both
sides); a figure is the median over the rounds of the ratio of quantising to copying.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from figure import machine, print_figure, progress, rounded, versions

from starling.weightsync.memory.arrays import allocate
from starling.weightsync.plan.layout import Box, Layout, Place, RankLayout, Shard, TensorSpec, packed_offsets, pieces_of
from starling.weightsync.quantise.formats import FORMATS
from starling.weightsync.quantise.recipe import linear_weights
from starling.weightsync.tensors.quantiser import Quantiser
from starling.weightsync.tensors.views import packed_views

BENCH = "weightsync_quantise"
COLUMNS = 4096


def seconds(work: Callable[[], Any]) -> float:
    """Return the processor time that the calling thread spends on `work`."""
    begin = time.thread_time()
    work()
    return time.thread_time() - begin


def layout_of(rows: int) -> Layout:
    """One weight on one rank."""
    shape = (rows, COLUMNS)
    shard = Shard(tensor=0, box=Box(offset=(0, 0), size=shape), storage="w", offset_bytes=0, strides=(COLUMNS, 1))
    spec = TensorSpec(name="layer.weight", shape=shape, dtype="bfloat16")
    return Layout(replica="policy-0", tensors=(spec,), ranks=(RankLayout(place=Place(), shards=(shard,)),))


def snapshot_of(layout: Layout) -> tuple[torch.Tensor, ...]:
    """Return the views of a snapshot whose memory is there."""
    _, extent = packed_offsets(piece.size_bytes for piece in pieces_of(layout, 0))
    return packed_views(layout, 0, allocate(extent))


def bench(rows: int, rounds: int) -> None:
    """Print a figure for each format."""
    layout = layout_of(rows)
    weight = torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    (copy,) = snapshot_of(layout)
    for name in FORMATS:
        progress(f"{name} ...")
        quantiser = Quantiser(layout, 0, linear_weights(name))
        views = snapshot_of(quantiser.layout)
        measured, total, copies = [], [], []
        for _ in range(rounds):
            copies.append(seconds(lambda: copy.copy_(weight)))
            measured.append(seconds(lambda: quantiser.measured([weight])))  # noqa: B023
            total.append(seconds(lambda: quantiser.measured([weight])(views)))  # noqa: B023
        ratios = [one / other for one, other in zip(total, copies, strict=True)]
        print_figure(
            BENCH,
            f"quantising a shard at the source over one copy of it, one thread, {name}",
            median(ratios),
            unit="ratio",
            goal=None,
            better="lower",
            detail={
                "shard_bytes": weight.nbytes,
                "published_bytes": sum(view.nbytes for view in views),
                "copy_s": rounded(median(copies)),
                "maxima_s": rounded(median(measured)),
                "quantise_s": rounded(median(total)),
                "gb_per_s": rounded(weight.nbytes / median(total) / 1e9),
                "rounds": rounds,
                "machine": machine(),
                "versions": versions("torch"),
            },
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="an eighth of the shard, fewer rounds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bench(*((2048, 5) if arguments.quick else (16384, 7)))


if __name__ == "__main__":
    main()
