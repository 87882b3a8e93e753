"""The memory of real processes is what the peaks say, and none of it is left afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from memory_pair import LAYER_BYTES, Pair, pair

from starling.weightsync.plan.offer import Transport

pytestmark = pytest.mark.system
NUM_LAYERS = (128 << 20) // LAYER_BYTES
BUCKET_BYTES = 16 << 20
ALLOWED_BYTES = 6 << 20
"""Stacks of threads, what malloc keeps, and objects: none of it grows with the model."""


@pytest.fixture(scope="module")
def processes() -> Iterator[Pair]:
    with pair(NUM_LAYERS, BUCKET_BYTES) as running:
        yield running


@pytest.mark.parametrize("in_place", [False, True], ids=["staged", "in_place"])
@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_both_ends_take_what_their_peaks_say(processes: Pair, transport: Transport, in_place: bool) -> None:
    publisher, destination = processes.measure(transport, in_place=in_place)
    assert publisher.planned >= 2 * NUM_LAYERS * LAYER_BYTES
    assert (destination.planned == 0) == (transport == "local" and in_place)
    for extra in (publisher, destination):
        assert abs(extra.measured - extra.planned) <= extra.planned / 10 + ALLOWED_BYTES
        assert extra.left <= ALLOWED_BYTES
