"""One fault of each kind, in an order that a seed decides: nothing is lost, nothing is trained twice, nothing stays."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from faults import FillDisk, Hold, Kill, SetClock
from ordeal import LEASE_S, finish, ordeal
from surroundings import HOUR_S

pytestmark = pytest.mark.system

LONG_S = 1.5 * LEASE_S
FAULTS = [
    Kill("controller"),
    Kill("policy-0"),
    Kill("rollout-0"),
    Kill("reward-0"),
    Hold("rollout-1", LONG_S),
    Hold("controller", LONG_S),
    FillDisk(LONG_S),
    SetClock(-30 * HOUR_S, "rollout-1"),
    SetClock(50 * HOUR_S, "controller"),
]


def test_a_run_lives_through_every_kind_of_fault(tmp_path: Path) -> None:
    seed = random.randrange(1_000_000)
    print(f"seed {seed}")  # shown when the test fails, to try that order again
    with ordeal(tmp_path) as run:
        for fault in random.Random(seed).sample(FAULTS, len(FAULTS)):
            print(run.strike(fault))
        story, found = finish(run)
    assert not found, "\n".join(found)
    assert len(story.incarnations) >= 3
    assert story.evaluations_closed
