"""Process that writes a journal until it is killed, and prints the number of durable records after each commit.

With a third argument it also compacts the journal again and again; its records then only count incarnations.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from starling.common.wire.messages import Prompt, Sampling, Status, TensorMeta, TrajectoryMeta
from starling.controller.core.compaction import compact
from starling.controller.core.plan import RunPlan
from starling.controller.core.records import CompletionsStored, ControllerStarted, Record, RewardsStored, RunBegun
from starling.controller.core.state import ControllerState, RunPrompts
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


class NoPrompts:
    """No prompts: nothing reads them."""

    def prompt(self, position: int) -> Prompt:
        """Raise an error."""
        raise IndexError(position)


def compact_for_ever() -> None:
    """Count incarnations for ever, with a compaction after every third commit."""
    journal, rng = Journal(Path(sys.argv[1])), random.Random(sys.argv[2])
    sampling = Sampling(max_tokens=1)
    plan = RunPlan(seed=0, sampling=sampling, eval_sampling=sampling)
    number = 0
    for record in journal.records():
        number = getattr(record, "incarnation", number)
    if number == 0:
        journal.append(RunBegun(run="r", plan={}))
    while True:
        for _ in range(3):
            for _ in range(rng.randint(1, 20)):
                number += 1
                journal.append(ControllerStarted(incarnation=number))
            journal.commit()
            print(number, flush=True)
        record = compact(ControllerState(plan, RunPrompts(NoPrompts(), NoPrompts(), ()), number))
        assert record is not None
        journal.compact(record)


if __name__ == "__main__":
    main() if len(sys.argv) == 3 else compact_for_ever()
