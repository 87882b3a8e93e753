"""Arenas: only the process that made one writes to it."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest
from transport_peers import local_offer, proof_for, reader

from starling.common.errors import WeightsError
from starling.weightsync.memory.arena import MAX_LIST_BYTES, Arena, ArenaMapping, _lock
from starling.weightsync.plan.layout import Box, ShardPiece
from starling.weightsync.transports.messages import OpenSnapshot
from starling.weightsync.transports.source import MAX_LATE, LateReaders, ReaderSession, SnapshotSource

SIZE = 4096
DEADLINE_S = 40.0


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


def test_file_that_can_be_made_smaller_is_not_an_arena(arena: Arena) -> None:
    """Its process could cut off what a reader copies, which would end the reader by SIGBUS."""
    with open(arena.address, "rb") as original:
        content = original.read()
    descriptor = os.memfd_create("copy", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(descriptor, content)
        with pytest.raises(WeightsError, match="is not an arena: it can be made smaller"):
            ArenaMapping(f"/proc/{os.getpid()}/fd/{descriptor}")
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        ArenaMapping(f"/proc/{os.getpid()}/fd/{descriptor}").close()
    finally:
        os.close(descriptor)
    arena.close()


@contextmanager
def arena_with(arena: Arena, listed: bytes) -> Iterator[str]:
    """Give the address of a copy of an arena that lists its pieces in these bytes, as a hostile process could make."""
    with open(arena.address, "rb") as original:
        content = bytearray(original.read())
    content[-int.from_bytes(content[24:32], "little") :] = listed
    content[24:32] = len(listed).to_bytes(8, "little")
    descriptor = os.memfd_create("copy", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(descriptor, content)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


def listed_with(**changes: object) -> bytes:
    box = Box(offset=(0,), size=(SIZE,))
    piece = msgspec.structs.replace(ShardPiece(names=("weight",), dtype="uint8", box=box), **changes)
    return msgspec.msgpack.encode([piece])


@pytest.mark.parametrize(
    "listed",
    [
        b"\xc1",
        msgspec.msgpack.encode([[["w"], "uint8", [[0], [1]], msgspec.Raw(b"\x91" * 200_000 + b"\xc0")]]),
        listed_with(dtype="float33"),
        listed_with(names=()),
        listed_with(box=Box(offset=(0,), size=())),
        listed_with(box=Box(offset=(0,), size=(-1,))),
        listed_with(box=Box(offset=(0,), size=(SIZE * 2,))),
        listed_with(box=Box(offset=(0, 0, 0), size=(0, 1 << 48, 1 << 48))),
    ],
    ids=["garbage", "deep", "dtype", "names", "dims", "negative", "larger", "huge"],
)
def test_pieces_of_another_process_are_checked(arena: Arena, listed: bytes) -> None:
    offer = local_offer(1, "")
    with arena_with(arena, listed_with()) as address, reader("local") as peer:
        peer.client.connect("source", msgspec.structs.replace(offer, address=address))
    before = len(os.listdir("/proc/self/fd"))
    with (
        arena_with(arena, listed) as address,
        reader("local") as peer,
        pytest.raises(WeightsError, match=r"The pieces of the arena /proc/\d+/fd/\d+ "),
    ):
        peer.client.connect("source", msgspec.structs.replace(offer, address=address))
    assert len(os.listdir("/proc/self/fd")) == before
    arena.close()


def test_long_list_of_pieces_is_not_decoded(arena: Arena) -> None:
    complaint = f"lists its pieces in {MAX_LIST_BYTES + 1} bytes"
    with arena_with(arena, bytes(MAX_LIST_BYTES + 1)) as address, pytest.raises(WeightsError, match=complaint):
        ArenaMapping(address)
    arena.close()


def test_writer_waits_no_more_for_a_reader_that_is_always_late() -> None:
    box = Box(offset=(0,), size=(SIZE,))
    arena = Arena([ShardPiece(names=("weight",), dtype="uint8", box=box)], num_slots=1)
    readers, lease = LateReaders(), ArenaMapping(arena.address)
    for timeout_s in [0.0] * MAX_LATE + [DEADLINE_S]:
        snapshot, secret = arena.commit(arena.claim(0.0))
        lease.open(snapshot, proof_for(local_offer(snapshot, secret)))
        readers.leased(1, "rollout-9", snapshot)
        with ThreadPoolExecutor(1) as pool:
            claimed = pool.submit(arena.claim, timeout_s, "revoke", readers)
            assert claimed.result(DEADLINE_S / 2) == 0
        assert not lease.valid()
        lease.release()
    lease.close()
    arena.close()


def test_refused_reader_takes_no_lease_for_which_a_writer_would_wait() -> None:
    piece = ShardPiece(names=("weight",), dtype="uint8", box=Box(offset=(0,), size=(SIZE,)))
    arena = Arena([piece])
    source = SnapshotSource(arena, [piece])
    snapshot, secret = arena.commit(arena.claim(0.0))
    proof = proof_for(local_offer(snapshot, secret))
    opening = OpenSnapshot(number=1, snapshot=snapshot, proof=proof)
    first, second = ReaderSession(source), ReaderSession(source)
    first.grant(opening)
    first.close()
    assert _lock(arena._fd, fcntl.F_WRLCK, snapshot)  # whoever asks for a lease is told that the snapshot is gone
    with pytest.raises(WeightsError, match="is wrong"):
        second.grant(msgspec.structs.replace(opening, proof="0" * 32))
    with pytest.raises(WeightsError, match="was used before"):
        second.grant(opening)
    second.close()
    arena.close()
