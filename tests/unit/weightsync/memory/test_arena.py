"""Arenas: only the process that made one writes to it."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest
from transport_peers import local_offer, proof_for

from starling.weightsync.memory.arena import Arena, ArenaMapping
from starling.weightsync.plan.layout import Box, ShardPiece

SIZE = 4096


@pytest.fixture
def arena() -> Arena:
    box = Box(offset=(0,), size=(SIZE,))
    return Arena([ShardPiece(names=("weight",), dtype="uint8", box=box)])


def test_no_other_descriptor_writes_to_an_arena(arena: Arena) -> None:
    """Any process of this user can open it through /proc, and would change weights that others are about to read."""
    slot = arena.claim(0.0)
    arena.slots[slot][:SIZE] = 7
    snapshot, secret = arena.commit(slot)
    descriptor = os.open(arena.address, os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            os.pwrite(descriptor, b"\0" * 8192, 0)
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, 8192, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)
    reader = ArenaMapping(arena.address)
    np.testing.assert_array_equal(
        reader.open(snapshot, proof_for(local_offer(snapshot, secret)))[:SIZE], np.full(SIZE, 7, np.uint8)
    )
    reader.close()
    arena.slots[slot][:SIZE] = 8  # its own process can still write
    arena.close()
