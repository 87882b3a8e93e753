"""One fault of each kind, in random order: no prompt is lost or trained twice, and no process is left."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from chaos_run import LEASE_S, chaos_run, finish
from faults import FillDisk, Hold, Kill, KillCompacting, SetClock
from host_faults import HOUR_S

pytestmark = [pytest.mark.system, pytest.mark.campaign]

LONG_S = 1.5 * LEASE_S
FAULTS = [
    Kill("controller"),
    KillCompacting(),
    Kill("policy-0"),
    Kill("rollout-0"),
    Kill("reward-0"),
    Hold("rollout-1", LONG_S),
    Hold("controller", LONG_S),
    FillDisk(LONG_S),
    SetClock(-30 * HOUR_S, "rollout-1"),
    SetClock(50 * HOUR_S, "controller"),
]


def test_run_survives_every_kind_of_fault(tmp_path: Path) -> None:
    seed = random.randrange(1_000_000)
    print(f"seed {seed}")  # shown when the test fails, to repeat this order
    with chaos_run(tmp_path) as run:
        for fault in random.Random(seed).sample(FAULTS, len(FAULTS)):
            print(run.inject(fault))
        history, found = finish(run)
    assert not found, "\n".join(found)
    assert len(history.incarnations) >= 4
    assert history.num_compactions >= 3
    assert history.evaluations_closed
