"""Peak memory of a publisher and of a destination in addition to their tensors, over the estimate.

    OMP_NUM_THREADS=1 python bench/weightsync_memory.py [--quick]

Two processes, 516 MiB of bf16 (`--quick`: 132 MiB) with tensors that are strided at the source, at the destination or
at neither; three versions are published, adopted and attested over each transport, through staging and in place.
The most memory that a process holds meanwhile, above that after a first tiny publication, is compared with
`publisher_peak` and `destination_peak` of the planner's estimate: private memory, and snapshots at the publisher alone.
A figure is good between 0.9 and 1.1. Where the estimate is 0, as in place over shared memory, it is in MiB.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args

import torch
from figure import machine, print_figure, progress, rounded, versions

from starling.weightsync.offers.offer import Transport
from starling.weightsync.transports.nixl.agent import has_nixl
from starling.weightsync.transports.ucx.worker import has_ucx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "unit" / "weightsync"))
from memory_pair import LAYER_BYTES, NUM_VERSIONS, ExtraMemory, pair

MIB = 1 << 20
LEAST = 0.9
MOST = 1.1
MOST_MIB = 4


def show(figure: str, extra: ExtraMemory | None, detail: dict[str, object]) -> None:
    """Print one figure; None for a transport that is not available."""
    detail = {**detail, **machine(), "versions": versions("torch", "numpy")}
    if extra is None:
        print_figure(
            "weightsync_memory",
            figure,
            None,
            unit="ratio",
            goal=MOST,
            better="lower",
            detail={"reason": "this machine cannot run the transport", **detail},
        )
        return
    detail |= {
        "at_least": LEAST if extra.planned else 0,
        "measured_mib": rounded(extra.measured / MIB),
        "planned_mib": rounded(extra.planned / MIB),
        "left_mib": rounded(extra.left / MIB),
    }
    print_figure(
        "weightsync_memory",
        figure,
        extra.measured / (extra.planned or MIB),
        unit="ratio" if extra.planned else "MiB",
        goal=MOST if extra.planned else MOST_MIB,
        better="lower",
        detail=detail,
    )


def is_available(transport: Transport) -> bool:
    """Return whether this machine can run a transport: NCCL needs a GPU."""
    available = {"ucx": has_ucx, "nixl": has_nixl, "nccl": torch.cuda.is_available}
    return transport not in available or available[transport]()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="132 MiB instead of 516, in smaller buckets")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    num_layers, bucket_bytes = (11, 16 * MIB) if quick else (43, 32 * MIB)
    detail: dict[str, object] = {
        "model_mib": rounded(num_layers * LAYER_BYTES / MIB),
        "bucket_mib": bucket_bytes // MIB,
        "num_versions": NUM_VERSIONS,
    }
    with pair(num_layers, bucket_bytes) as running:
        for transport in get_args(Transport):
            for in_place in (False, True):
                way = f"{transport}_{'in_place' if in_place else 'staged'}"
                progress(f"measuring {way}")
                extras = running.measure(transport, in_place=in_place) if is_available(transport) else (None, None)
                for side, extra in zip(("publisher", "destination"), extras, strict=True):
                    show(f"{side}_{way}", extra, detail)


if __name__ == "__main__":
    main()
