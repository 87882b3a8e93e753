"""A short fault loop, with every kind over every transport; `bench/weightsync_faults.py` runs the long one."""

from __future__ import annotations

import pytest
import torch
from fault_kinds import FAULTS
from fault_loop import TRANSPORTS, run_faults

torch.set_num_threads(1)
pytestmark = pytest.mark.system
NUM_FAULTS = 33


def test_destination_survives_random_faults() -> None:
    report = run_faults(NUM_FAULTS, seed=0)
    assert not report.failures
    assert report.survived == report.injected
    assert report.injected.total() == NUM_FAULTS
    assert set(report.injected) == set(FAULTS)
    assert set(report.transports) == set(TRANSPORTS)
    assert not report.leaks
