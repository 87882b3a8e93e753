"""A short loop of faults, with every kind over every transport; `bench/weightsync_faults.py` runs the long one."""

from __future__ import annotations

import pytest
import torch
from fault_kinds import FAULTS
from fault_loop import TRANSPORTS, run_faults

torch.set_num_threads(1)
pytestmark = pytest.mark.system
NUM_FAULTS = 33


def test_whatever_happens_the_destination_knows_what_it_holds() -> None:
    report = run_faults(NUM_FAULTS, seed=0)
    assert not report.failures
    assert report.survived == report.injected
    assert report.injected.total() == NUM_FAULTS
    assert set(report.injected) == set(FAULTS)
    assert set(report.transports) == set(TRANSPORTS)
    assert not report.leaks
