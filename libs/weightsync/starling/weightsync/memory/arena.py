"""Arena: snapshots in anonymous shared memory, and the leases on them.

An arena is a memfd: it has no name, so nothing stays behind however its process ends, and other processes of the same
user map it through ``/proc/<pid>/fd/<n>``, for reading only. It has a page of header, the slots, and a list of the
pieces in each slot. Per slot the header has the id of the snapshot in it (0 while it is written), the snapshot's
secret, whether the digests of its pieces, which follow the pieces, are there yet, and the handle of a copy of it in
memory of a device, if there is one. So the handle can be read by those who may read the snapshot, and by no others.

A lease is a shared lock (open file description lock) on the byte numbered like the snapshot, far beyond the arena's
end. The kernel drops it when its holder dies, and a lease on a revoked snapshot blocks no one. A writer takes the
exclusive lock before it sets a snapshot's id to 0, so a reader that has seen the id *after* taking its lease holds a
valid one. A writer that has waited long enough may set the id to 0 without the lock: readers check the id again after
they have read, and the digests catch what a reordering of memory accesses hides.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import struct
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Final, Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from starling.common.errors import WeightsError
from starling.weightsync.costs.estimate import NUM_SNAPSHOTS, PAGE_BYTES, slot_bytes
from starling.weightsync.memory.arrays import Memory
from starling.weightsync.memory.device_handles import DeviceHandle, decode_handle, encode_handle
from starling.weightsync.memory.huge_pages import collapse, map_shared
from starling.weightsync.memory.memory_files import address_of, create_file, open_file, seal
from starling.weightsync.offers.tickets import TicketProof, accept
from starling.weightsync.plan.layout import MAX_LAYOUT_BOXES, UNDECODABLE, ShardPiece, packed_offsets

WhenBusy = Literal["revoke", "wait", "skip"]
"""What a writer does when every slot is being read: wait and then revoke the oldest snapshot, wait and then fail, or
fail at once."""

MAGIC: Final = int.from_bytes(b"STARARN2", "little")
SECRET_BYTES: Final = 16
MAX_SLOTS: Final = 4
MAX_LIST_BYTES: Final = 32 << 20
"""Maximum size of the list of pieces of another process's arena. A rank of a model of 140,000 tensors, none of which is
split, lists them in 15 MiB."""
_NUM_SLOTS_AT, _EXTENT_AT, _LIST_BYTES_AT, _IDS_AT, _DIGESTED_AT = 1, 2, 3, 8, 12  # words of the header
_SECRETS_AT: Final = 256
_HANDLES_AT: Final = 512
_HANDLE_BYTES: Final = 256
"""Per slot: the length of its encoded handle in a word, 0 for none, and the handle."""
_LOCKS_AT: Final = 1 << 60
_RETRY_S: Final = 0.0005

_pieces: Final = msgspec.msgpack.Decoder(Annotated[tuple[ShardPiece, ...], msgspec.Meta(max_length=MAX_LAYOUT_BOXES)])

log = logging.getLogger(__name__)


class SnapshotsBusyError(WeightsError):
    """Every snapshot is being read, and `when_busy` forbids to revoke one."""


class SnapshotReaders(Protocol):
    """What a writer knows of the readers of its snapshots."""

    def are_waited_for(self, snapshot: int) -> bool:
        """Return whether a writer still waits for those of `snapshot`."""

    def note_late(self, snapshot: int) -> None:
        """Note that a writer has waited in vain for those of `snapshot`."""


def _lock(fd: int, kind: int, snapshot: int) -> bool:
    """Try to set a lock of `kind` on the byte of `snapshot`; return whether it is set."""
    request = struct.pack("hhqqi4x", kind, os.SEEK_SET, _LOCKS_AT + snapshot, 1, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, request)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _gone(snapshot: int) -> WeightsError:
    return WeightsError(f"Snapshot {snapshot} is gone; pull a newer version.")


class ArenaMapping:
    """An arena of this or another process, mapped for reading, with one lease at a time."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._fd, size = open_file(address, "an arena", PAGE_BYTES)
        try:
            memory = map_shared(self._fd, size, writable=False)
        except OSError as error:
            os.close(self._fd)
            raise WeightsError(f"The arena {address} cannot be mapped: {error}.") from error
        self._header: npt.NDArray[np.uint64] | None = memory[:PAGE_BYTES].view(np.uint64)
        self._bytes: Memory | None = memory
        self.proof: TicketProof | None = None
        """The ticket that opened the leased snapshot."""
        self._leased = self._slot = 0  # id of the leased snapshot, 0 for none, and its slot
        self._num_slots, self._extent, list_bytes = (int(self._header[at]) for at in (1, 2, 3))
        end = PAGE_BYTES + self._num_slots * self._extent + list_bytes
        if int(self._header[0]) != MAGIC or not 0 < self._num_slots <= MAX_SLOTS or end > size:
            self.close()
            raise WeightsError(f"{address} is not an arena of this version.")
        if list_bytes > MAX_LIST_BYTES:
            self.close()
            raise WeightsError(
                f"The arena {address} lists its pieces in {list_bytes} bytes, expected at most {MAX_LIST_BYTES}."
            )
        self._list = (end - list_bytes, end)

    def pieces(self) -> tuple[ShardPiece, ...]:
        """Return the pieces in each slot.

        Raises:
            WeightsError: they cannot be decoded, are malformed, or larger than a slot.
        """
        assert self._bytes is not None
        begin, end = self._list
        listed = self._bytes[begin:end].tobytes()  # a copy, which its process cannot change
        try:
            pieces: tuple[ShardPiece, ...] = _pieces.decode(listed)
        except UNDECODABLE as error:
            raise WeightsError(f"The pieces of the arena {self._address} cannot be decoded: {error}.") from error
        if not all(piece.is_well_formed for piece in pieces) or slot_bytes(pieces) > self._extent:
            raise WeightsError(f"The pieces of the arena {self._address} are malformed, or larger than its slots.")
        return pieces

    def check(self, snapshot: int, proof: str) -> TicketProof:
        """Return the ticket for `snapshot` that `proof` proves. Takes no lease, so it delays no writer.

        Raises:
            WeightsError: the proof is wrong, or the snapshot is gone.
        """
        assert self._bytes is not None
        assert self._header is not None
        slot = snapshot % self._num_slots
        if snapshot <= 0 or int(self._header[_IDS_AT + slot]) != snapshot:
            raise _gone(snapshot)
        begin = _SECRETS_AT + slot * SECRET_BYTES
        return accept(self._bytes[begin : begin + SECRET_BYTES].tobytes().hex(), proof, snapshot=snapshot)

    def open(self, snapshot: int, proof: str) -> Memory:
        """Take a lease on `snapshot` for the reader whose ticket `proof` proves, and return its memory.

        Raises:
            WeightsError: the proof is wrong, or the snapshot is gone.
        """
        assert self._bytes is not None
        self.release()
        proven = self.check(snapshot, proof)  # first: a writer would wait for the lease of a stranger, too
        if not _lock(self._fd, fcntl.F_RDLCK, snapshot):
            raise _gone(snapshot)
        self._leased, self._slot, self.proof = snapshot, snapshot % self._num_slots, proven
        if not self.valid():
            self.release()
            raise _gone(snapshot)
        return self._bytes[PAGE_BYTES + self._slot * self._extent :][: self._extent]

    def device_handle(self, least_bytes: int) -> DeviceHandle | None:
        """Return the handle of the copy of the opened snapshot in memory of a device; None if there is none.

        `least_bytes`: what the pieces of the arena take.

        Raises:
            WeightsError: it is malformed, or of another process, or of less memory than that.
        """
        assert self._bytes is not None
        begin = _HANDLES_AT + self._slot * _HANDLE_BYTES
        entry = self._bytes[begin : begin + _HANDLE_BYTES].tobytes()  # a copy, which its process cannot change
        length = int.from_bytes(entry[:8], "little")
        if not length or not self.valid():
            return None
        return decode_handle(entry[8 : 8 + length], self._address, least_bytes)

    def valid(self) -> bool:
        """Return whether the snapshot opened last is still readable."""
        return self._header is not None and self._leased > 0 and int(self._header[_IDS_AT + self._slot]) == self._leased

    def digested(self) -> bool:
        """Return whether the opened snapshot has the digests of its pieces yet."""
        return (
            self._header is not None
            and self._leased > 0
            and int(self._header[_DIGESTED_AT + self._slot]) == self._leased
        )

    def release(self) -> None:
        """Give the lease back, if there is one."""
        if self._leased:
            _lock(self._fd, fcntl.F_UNLCK, self._leased)
            self._leased, self.proof = 0, None

    def close(self) -> None:
        """Release and unmap; the memory is freed with the last view of it."""
        if self._header is not None:
            self._leased = 0
            self._header = self._bytes = None
            os.close(self._fd)


class Arena:
    """Slots for `pieces` and their digests, written by this process."""

    def __init__(self, pieces: Sequence[ShardPiece], *, num_slots: int = NUM_SNAPSHOTS) -> None:
        _, self.extent_bytes = packed_offsets(piece.size_bytes for piece in pieces)
        self._num_slots, self._num_pieces = num_slots, len(pieces)
        listed = msgspec.msgpack.encode(pieces)
        extent = slot_bytes(pieces)
        end = PAGE_BYTES + num_slots * extent
        try:
            self._fd = create_file("starling-snapshots", end + len(listed))
        except OSError as error:
            raise WeightsError(f"No {end} bytes of memory for {num_slots} snapshots: {error.strerror}.") from error
        try:
            self._bytes: Memory = map_shared(self._fd, end + len(listed), writable=True)
            seal(self._fd)
        except OSError as error:
            os.close(self._fd)
            raise WeightsError(f"No {end} bytes of memory for {num_slots} snapshots: {error.strerror}.") from error
        self._header = self._bytes[:PAGE_BYTES].view(np.uint64)
        self._bytes[end:] = np.frombuffer(listed, np.uint8)
        self._header[_NUM_SLOTS_AT], self._header[_EXTENT_AT] = num_slots, extent
        self._header[_LIST_BYTES_AT] = len(listed)
        self._header[0] = MAGIC
        self._snapshots = [0] * num_slots
        self._count = 0
        self.slots = tuple(self._bytes[PAGE_BYTES + slot * extent :][:extent] for slot in range(num_slots))
        """The memory of each slot."""

    @property
    def address(self) -> str:
        """Path by which other processes of this user map the arena."""
        return address_of(self._fd)

    def collapse(self, stopped: Callable[[], bool]) -> None:
        """Collapse the arena into huge pages, for reads through the kernel, until `stopped`. Thread-safe."""
        size = collapse(self._bytes, stopped)
        log.debug("%d of %d bytes of snapshots are in huge pages", size, self._bytes.nbytes)

    def claim(self, timeout_s: float, when_busy: WhenBusy = "revoke", readers: SnapshotReaders | None = None) -> int:
        """Claim a slot that is not being read, the oldest first, and return its index.

        When all are being read for `timeout_s`, `when_busy` decides; with ``skip`` there is no wait. With ``revoke`` it
        ends when the `readers` of the oldest one are waited for no more.

        Raises:
            SnapshotsBusyError: `when_busy` is ``wait`` or ``skip`` and no slot is free.
        """
        end = time.monotonic() + (0.0 if when_busy == "skip" else timeout_s)
        slots = sorted(range(self._num_slots), key=lambda slot: self._snapshots[slot])
        while True:
            for slot in slots:
                if self._retire(slot):
                    return slot
            if time.monotonic() >= end:
                if when_busy == "revoke" and readers is not None:
                    readers.note_late(self._snapshots[slots[0]])
                break
            if when_busy == "revoke" and readers is not None and not readers.are_waited_for(self._snapshots[slots[0]]):
                break
            time.sleep(_RETRY_S)
        if when_busy != "revoke":
            waited = "" if when_busy == "skip" else f" after {timeout_s:g} s"
            raise SnapshotsBusyError(f"Every snapshot is still being read{waited}: this version is not published.")
        self._revoke(slots[0])
        return slots[0]

    def commit(self, slot: int, handle: DeviceHandle | None = None) -> tuple[int, str]:
        """Make the claimed slot readable. Return the new snapshot's id and secret.

        `handle`: of a copy of it in memory of a device, in which the pieces lie as in the slot.
        """
        encoded = b"" if handle is None else encode_handle(handle)
        entry = len(encoded).to_bytes(8, "little") + encoded
        begin = _HANDLES_AT + slot * _HANDLE_BYTES
        self._bytes[begin : begin + len(entry)] = np.frombuffer(entry, np.uint8)
        self._count += 1
        snapshot = self._num_slots * self._count + slot
        secret = secrets.token_bytes(SECRET_BYTES)
        begin = _SECRETS_AT + slot * SECRET_BYTES
        self._bytes[begin : begin + SECRET_BYTES] = np.frombuffer(secret, np.uint8)
        self._snapshots[slot] = snapshot
        self._header[_IDS_AT + slot] = snapshot
        return snapshot, secret.hex()

    def set_digests(self, snapshot: int, digests: Sequence[bytes]) -> None:
        """Add the digests of the pieces of a snapshot, unless it is gone."""
        slot = snapshot % self._num_slots
        if self._snapshots[slot] == snapshot and len(digests) == self._num_pieces:
            table = np.frombuffer(b"".join(digests), np.uint8)
            self.slots[slot][self.extent_bytes : self.extent_bytes + table.nbytes] = table
            self._header[_DIGESTED_AT + slot] = snapshot

    def is_readable(self, snapshot: int) -> bool:
        """Return whether the snapshot can still be read."""
        return self._snapshots[snapshot % self._num_slots] == snapshot

    def revoke_all(self) -> None:
        """Revoke every snapshot."""
        for slot in range(self._num_slots):
            self._revoke(slot)

    def close(self) -> None:
        """Revoke the snapshots and close the arena, once; its memory is freed with the last view of it."""
        self.revoke_all()
        descriptor, self._fd = self._fd, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _retire(self, slot: int) -> bool:
        """Revoke the slot's snapshot unless a reader holds a lease on it."""
        snapshot = self._snapshots[slot]
        if snapshot and not _lock(self._fd, fcntl.F_WRLCK, snapshot):
            return False
        self._revoke(slot)
        if snapshot:
            _lock(self._fd, fcntl.F_UNLCK, snapshot)
        return True

    def _revoke(self, slot: int) -> None:
        self._header[_IDS_AT + slot] = 0
        self._snapshots[slot] = 0
