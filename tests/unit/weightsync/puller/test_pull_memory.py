"""Peak memory of real processes equals its estimate, and none of it is left afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from memory_pair import LAYER_BYTES, MemoryPair, pair

from starling.weightsync.offers.offer import Transport

pytestmark = pytest.mark.system
NUM_LAYERS = (128 << 20) // LAYER_BYTES
BUCKET_BYTES = 16 << 20
ALLOWED_BYTES = 6 << 20
"""Thread stacks, malloc's caches, and objects: independent of the model's size."""


@pytest.fixture(scope="module")
def processes() -> Iterator[MemoryPair]:
    with pair(NUM_LAYERS, BUCKET_BYTES) as running:
        yield running


@pytest.mark.sample(1)
@pytest.mark.parametrize("in_place", [False, True], ids=["staged", "in_place"])
@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_peak_memory_equals_its_estimate(processes: MemoryPair, transport: Transport, in_place: bool) -> None:
    publisher, destination = processes.measure(transport, in_place=in_place)
    assert publisher.planned >= 2 * NUM_LAYERS * LAYER_BYTES
    assert (destination.planned == 0) == (transport == "local" and in_place)
    for extra in (publisher, destination):
        assert abs(extra.measured - extra.planned) <= extra.planned / 10 + ALLOWED_BYTES
        assert extra.left <= ALLOWED_BYTES
