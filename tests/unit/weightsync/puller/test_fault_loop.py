"""A short fault loop, with every kind over every transport; `bench/weightsync_faults.py` runs the long one."""

from __future__ import annotations

import pytest
import torch
from fault_loop import ALL_FAULTS, DECK, TRANSPORTS, run_faults

torch.set_num_threads(1)
pytestmark = pytest.mark.system


def test_destination_survives_random_faults() -> None:
    report = run_faults(len(DECK), seed=0)
    assert not report.failures
    assert report.survived == report.injected
    assert report.injected.total() == len(DECK)
    assert set(report.injected) == set(ALL_FAULTS)
    assert set(report.transports) == set(TRANSPORTS)
    assert not report.leaks
