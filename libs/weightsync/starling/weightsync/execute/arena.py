"""The arena: two snapshots in anonymous shared memory, and the leases on them.

An arena is a memfd: it has no name, so nothing stays behind however its process ends, and other processes of the same
user map it through ``/proc/<pid>/fd/<n>``. One page of header, then two slots. Per slot the header has the id of the
snapshot in it (0 while it is written) and the snapshot's token.

A lease is a shared lock (open file description lock) on the byte numbered like the snapshot, far beyond the arena's
end. The kernel drops it when its holder dies, it cannot be forgotten, and a lease on a revoked snapshot hinders
nobody. A writer takes the exclusive lock before it sets a snapshot's id to 0, so whoever holds a lease and has seen the
id *after* taking it holds a valid one. A writer that has waited long enough sets the id to 0 without the lock: readers
look at it again after they have read, and the digests catch whatever a reordering of memory accesses could hide.
"""

from __future__ import annotations

import fcntl
import hmac
import mmap
import os
import re
import secrets
import struct
import time
from typing import Final

import numpy as np
import numpy.typing as npt

from starling.common.errors import WeightsError
from starling.weightsync.execute.regions import Memory

MAGIC: Final = int.from_bytes(b"STARARN1", "little")
HEADER_BYTES: Final = 4096
TOKEN_BYTES: Final = 16
_TOKENS_AT: Final = 64
_LOCKS_AT: Final = 1 << 60
_RETRY_S: Final = 0.0005
_ADDRESS: Final = re.compile(r"/proc/[0-9]+/fd/[0-9]+")


def _lock(fd: int, kind: int, snapshot: int) -> bool:
    """Try to set a lock of `kind` on the byte of `snapshot`; the answer is whether it is set."""
    request = struct.pack("hhqqi4x", kind, os.SEEK_SET, _LOCKS_AT + snapshot, 1, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, request)
    except (BlockingIOError, PermissionError):
        return False
    return True


class Mapping:
    """An arena of this or another process, mapped for reading."""

    def __init__(self, address: str) -> None:
        if not _ADDRESS.fullmatch(address):
            raise WeightsError(f"{address!r} is not the address of an arena.")
        try:
            self._fd = os.open(address, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise WeightsError(
                f"The arena {address} cannot be opened ({error.strerror}): did its process end?"
            ) from error
        try:
            size = os.fstat(self._fd).st_size
            if size < HEADER_BYTES:
                raise WeightsError(f"{address} is not an arena: it has {size} bytes.")
            memory = mmap.mmap(self._fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            os.close(self._fd)
            raise WeightsError(f"The arena {address} cannot be mapped: {error}.") from error
        except WeightsError:
            os.close(self._fd)
            raise
        self._header: npt.NDArray[np.uint64] | None = np.frombuffer(memory, np.uint64, HEADER_BYTES // 8)
        self._bytes: Memory | None = np.frombuffer(memory, np.uint8)
        self._held = 0
        if int(self._header[0]) != MAGIC:
            self.close()
            raise WeightsError(f"{address} is not an arena of this version.")

    def open(self, snapshot: int, token: str) -> Memory:
        """Take a lease on `snapshot` and return its memory.

        Raises:
            WeightsError: another token, or the snapshot is gone.
        """
        assert self._bytes is not None
        self.release()
        if snapshot <= 0 or not _lock(self._fd, fcntl.F_RDLCK, snapshot):
            raise WeightsError(f"Snapshot {snapshot} is not to be had any more; pull a newer version.")
        self._held = snapshot
        slot = snapshot & 1
        if not self.valid():
            self.release()
            raise WeightsError(f"Snapshot {snapshot} is not to be had any more; pull a newer version.")
        begin = _TOKENS_AT + slot * TOKEN_BYTES
        if not hmac.compare_digest(self._bytes[begin : begin + TOKEN_BYTES].tobytes().hex().encode(), token.encode()):
            self.release()
            raise WeightsError(f"The token for snapshot {snapshot} is wrong.")
        extent = (self._bytes.nbytes - HEADER_BYTES) // 2
        return self._bytes[HEADER_BYTES + slot * extent :][:extent]

    def valid(self) -> bool:
        """Whether the snapshot last opened still stands."""
        return self._header is not None and self._held > 0 and int(self._header[1 + (self._held & 1)]) == self._held

    def release(self) -> None:
        """Give the lease back, if there is one."""
        if self._held:
            _lock(self._fd, fcntl.F_UNLCK, self._held)
            self._held = 0

    def close(self) -> None:
        """Release and unmap; the memory goes when the last view of it does."""
        if self._header is not None:
            self._held = 0
            self._header = self._bytes = None
            os.close(self._fd)


class Arena:
    """Two slots of `extent_bytes` each, written by this process."""

    def __init__(self, extent_bytes: int) -> None:
        size = HEADER_BYTES + 2 * extent_bytes
        self._fd = os.memfd_create("starling-snapshots", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self._fd, 0, size)  # no memory is an error here, and not a SIGBUS later
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            memory = mmap.mmap(self._fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            os.close(self._fd)
            raise WeightsError(f"No {size} bytes of memory for two snapshots: {error.strerror}.") from error
        self._header = np.frombuffer(memory, np.uint64, HEADER_BYTES // 8)
        self._bytes: Memory = np.frombuffer(memory, np.uint8)
        self._header[0] = MAGIC
        self._snapshots = [0, 0]
        self._count = 0
        self.slots = tuple(self._bytes[HEADER_BYTES + slot * extent_bytes :][:extent_bytes] for slot in range(2))
        """The memory of each slot."""

    @property
    def address(self) -> str:
        """Where other processes of this user find the arena."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def claim(self, timeout_s: float) -> int:
        """Take a slot that nobody reads, the older one first, and return its index.

        After `timeout_s` the older one is taken whoever reads it: its snapshot is revoked.
        """
        end = time.monotonic() + timeout_s
        slots = sorted(range(2), key=lambda slot: self._snapshots[slot])
        while True:
            for slot in slots:
                if self._retire(slot):
                    return slot
            if time.monotonic() >= end:
                self._void(slots[0])
                return slots[0]
            time.sleep(_RETRY_S)

    def commit(self, slot: int) -> tuple[int, str]:
        """Let the claimed slot be read. Return the new snapshot's id and token."""
        self._count += 1
        snapshot = 2 * self._count + slot
        token = secrets.token_bytes(TOKEN_BYTES)
        begin = _TOKENS_AT + slot * TOKEN_BYTES
        self._bytes[begin : begin + TOKEN_BYTES] = np.frombuffer(token, np.uint8)
        self._snapshots[slot] = snapshot
        self._header[1 + slot] = snapshot
        return snapshot, token.hex()

    def close(self) -> None:
        """Void both snapshots and close the arena; its memory goes when the last view of it does."""
        for slot in range(2):
            self._void(slot)
        os.close(self._fd)

    def _retire(self, slot: int) -> bool:
        """Void the slot's snapshot unless somebody holds a lease on it."""
        snapshot = self._snapshots[slot]
        if snapshot and not _lock(self._fd, fcntl.F_WRLCK, snapshot):
            return False
        self._void(slot)
        if snapshot:
            _lock(self._fd, fcntl.F_UNLCK, snapshot)
        return True

    def _void(self, slot: int) -> None:
        self._header[1 + slot] = 0
        self._snapshots[slot] = 0
