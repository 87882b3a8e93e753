"""Process that writes a journal until it is killed, and prints the number of durable records after each commit."""

from __future__ import annotations

import random
import sys
from pathlib import Path

from starling.common.wire.messages import Status, TensorMeta, TrajectoryMeta
from starling.controller.core.records import CompletionsStored, Record, RewardsStored
from starling.controller.shell.journal.journal import Journal

TENSORS = (TensorMeta(dtype="int32", shape=(50,), nbytes=200),)


def record_of(number: int) -> tuple[Record, tuple[bytes, ...]]:
    """Return record number `number` of every writer, and its payload."""
    key = f"t{number // 2}"
    if number % 2:
        return RewardsStored(key=key, rewards=(float(number),)), ()
    trajectory = TrajectoryMeta(
        status=Status.OK, num_tokens=number, text=f"text {number}", oldest_version=0, newest_version=0
    )
    return CompletionsStored(key=key, trajectories=(trajectory,), tensors=TENSORS), (number.to_bytes(4, "big") * 50,)


def main() -> None:
    """Write records in commits of 1 to 20 until killed."""
    journal, rng = Journal(Path(sys.argv[1])), random.Random(sys.argv[2])
    number = sum(1 for _ in journal.read())
    while True:
        for _ in range(rng.randint(1, 20)):
            journal.append(*record_of(number))
            number += 1
        journal.commit()
        print(number, flush=True)


if __name__ == "__main__":
    main()
