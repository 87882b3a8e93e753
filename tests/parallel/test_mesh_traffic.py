"""What a mesh sends for a step, beside its formula: nothing is gathered twice."""

from __future__ import annotations

from typing import Any

import pytest
from mesh_traffic import EACH_AXIS, PAIRS, traffic_ratios


@pytest.mark.parametrize(("name", "parallel"), EACH_AXIS)
def test_mesh_sends_what_the_formula_says(name: str, parallel: dict[str, Any]) -> None:
    check(name, parallel)


@pytest.mark.campaign
@pytest.mark.parametrize(("name", "parallel"), PAIRS)
def test_other_meshes_send_what_the_formula_says(name: str, parallel: dict[str, Any]) -> None:
    check(name, parallel)


def check(name: str, parallel: dict[str, Any]) -> None:
    """Compare what each rank of a mesh sends for a step with the formula, axis by axis."""
    for ratios in traffic_ratios(name, parallel):
        assert set(ratios) >= set(parallel) - {"reshard", "context", "schedule"}
        # The last shards are smaller than the formula says; metrics are in no formula.
        assert all(0.98 <= ratio <= 1.05 for ratio in ratios.values()), ratios
