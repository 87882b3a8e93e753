"""Fault loops: every kind once, and in the campaign over every transport; `bench/weightsync_faults.py` runs more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fault_loop import ALL_FAULTS, DECK, TRANSPORTS, covering_deck, run_faults

torch.set_num_threads(1)
pytestmark = pytest.mark.system


@pytest.mark.parametrize(
    "faults",
    [covering_deck(), pytest.param(DECK, marks=pytest.mark.campaign)],
    ids=["each kind", "each kind over each transport"],
)
def test_destination_survives_random_faults(faults: tuple[tuple[Any, Any], ...]) -> None:
    report = run_faults(len(faults), seed=0, faults=faults)
    assert not report.failures
    assert report.survived == report.injected
    assert report.injected.total() == len(faults)
    assert set(report.injected) == set(ALL_FAULTS)
    assert set(report.transports) == set(TRANSPORTS)
    assert not report.leaks
