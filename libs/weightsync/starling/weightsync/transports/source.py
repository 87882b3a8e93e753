"""The snapshots that one rank offers, and the session of one reader; shared by the servers of all transports.

A `SnapshotSource` belongs to the process that holds the weights. A `ReaderSession` is one reader's connection: it holds
a lease on at most one snapshot at a time, granted for a ticket of that snapshot.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import numpy as np

from starling.common.errors import WeightsError
from starling.weightsync.memory.arena import Arena, ArenaMapping
from starling.weightsync.memory.arrays import Array, Memory, is_direct, pack, packed_arrays, part_of
from starling.weightsync.memory.device_memory import SharedDeviceMemory
from starling.weightsync.memory.digests import DigestCache, DigestKey, digest_of_array, digest_of_copy
from starling.weightsync.offers.tickets import SPENT, TicketProof, reading_cost
from starling.weightsync.plan.boxes import contains
from starling.weightsync.plan.layout import Box, ShardPiece, packed_offsets
from starling.weightsync.transports.endpoints import WAITING_INTERVAL_S
from starling.weightsync.transports.messages import (
    MeasureDeltas,
    OpenSnapshot,
    ReadBoxes,
    ReleaseSnapshot,
    Request,
    SourceAnswer,
    refusal,
)

MAX_LATE: Final = 3
LATE_S: Final = 3600.0
"""A publisher waits no more for a replica for which it has waited in vain so often within these seconds: one that
always holds a snapshot would stop every step."""
NOT_OPENED: Final = "Refused: open a snapshot with its ticket first."
MAX_REFUSED: Final = 8
"""Requests without a valid lease that are refused on one connection, which then ends: each takes processor time of the
source's process, also of a stranger's. A reader drops a source that refuses to open a snapshot."""
REVOKED: Final = "The snapshot was revoked while it was read: too slow; pull a newer version."


class LastRefusalError(WeightsError):
    """A refusal after which the connection ends: the reader, which has spent what its ticket allows or has no lease,
    would ask again and again."""


class DeltaSource(Protocol):
    """The deltas that a source can send instead of whole boxes. Thread-safe.

    Bases are named by version alone: the digest of the result proves that it was the right one.
    """

    def bases(self, snapshot: int) -> tuple[int, ...]:
        """Return the versions against which there may be deltas of a snapshot."""

    def ready(self, snapshot: int, boxes: Sequence[tuple[int, Box]]) -> bool:
        """Return whether `delta` can answer for these boxes of pieces, or whether a comparison is still running."""

    def are_whole(self, snapshot: int, boxes: Sequence[tuple[int, Box]]) -> bool:
        """Return whether it is known already that none of these boxes, which may not have arrived, has a delta."""

    def delta(self, snapshot: int, index: int, box: Box, base: int) -> Memory | None:
        """Return the delta of a box of a piece against version `base`, or None where the whole box must be sent."""

    def cached_delta(self, snapshot: int, index: int, box: Box, base: int) -> Memory | None:
        """Return a delta that `delta` has returned before."""


class NoDeltas:
    """The `DeltaSource` of a source that always sends whole boxes."""

    def bases(self, snapshot: int) -> tuple[int, ...]:
        """See `DeltaSource.bases`."""
        return ()

    def ready(self, snapshot: int, boxes: Sequence[tuple[int, Box]]) -> bool:
        """See `DeltaSource.ready`."""
        return True

    def are_whole(self, snapshot: int, boxes: Sequence[tuple[int, Box]]) -> bool:
        """See `DeltaSource.are_whole`."""
        return True

    def delta(self, snapshot: int, index: int, box: Box, base: int) -> Memory | None:
        """See `DeltaSource.delta`."""
        return None

    def cached_delta(self, snapshot: int, index: int, box: Box, base: int) -> Memory | None:
        """See `DeltaSource.cached_delta`."""
        return None


class PiecesByName:
    """The pieces of one rank, found by tensor name."""

    def __init__(self, pieces: Sequence[ShardPiece]) -> None:
        self.pieces = tuple(pieces)
        self.offsets, self.extent_bytes = packed_offsets(piece.size_bytes for piece in self.pieces)
        """Size of the pieces in a snapshot; their digests follow."""
        self._by_name: dict[str, list[int]] = {}
        for index, piece in enumerate(self.pieces):
            for name in piece.names:
                self._by_name.setdefault(name, []).append(index)

    def find(self, wanted: ShardPiece) -> int:
        """Return the index of the piece that contains a box.

        Raises:
            WeightsError: no piece of this rank does.
        """
        for name in wanted.names:
            for index in self._by_name.get(name, ()):
                piece = self.pieces[index]
                if piece.dtype == wanted.dtype and contains(piece.box, wanted.box):
                    return index
        raise WeightsError(f"Box {wanted.box} of {wanted.names[0]} ({wanted.dtype}) is not held by this rank.")


class PendingBoxes:
    """The boxes of a relay's snapshot that have not arrived yet. Thread-safe."""

    def __init__(self, missing: Iterable[tuple[int, Box]]) -> None:
        self._lock = threading.Lock()
        self._missing: dict[int, set[Box]] = {}
        for index, box in missing:
            self._missing.setdefault(index, set()).add(box)
        self._arrived: dict[int, set[Box]] = {index: set() for index in self._missing}

    def arrived(self, index: int, box: Box) -> None:
        """Record that a box of a piece has arrived."""
        with self._lock:
            self._missing[index].discard(box)
            self._arrived[index].add(box)

    def has(self, index: int, box: Box) -> bool:
        """Return whether all of `box`, a part of a piece, has arrived.

        Of another box than those that arrive this is known when the whole piece is there. Readers of a relay have its
        plan, and so its boxes; to compare others with each of these would take the time of the pull.
        """
        with self._lock:
            return not self._missing.get(index) or box in self._arrived[index]


class LateReaders:
    """The leases of a source's readers, and which replicas its publisher waits for: `SnapshotReaders`. Thread-safe.

    Leases of other processes, by shared memory, are not known here; they are waited for.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: dict[int, tuple[str, int]] = {}
        """Replica and snapshot of each session."""
        self._late: dict[str, deque[float]] = {}
        """Monotonic times, by replica."""

    def leased(self, session: int, replica: str, snapshot: int) -> None:
        """Note that a session has a lease."""
        with self._lock:
            self._leases[session] = replica, snapshot

    def returned(self, session: int) -> None:
        """Note that it has none."""
        with self._lock:
            self._leases.pop(session, None)

    def are_waited_for(self, snapshot: int) -> bool:
        """See `SnapshotReaders.are_waited_for`."""
        with self._lock:
            names = self._readers(snapshot)
            return not names or not all(map(self._is_late, names))

    def note_late(self, snapshot: int) -> None:
        """See `SnapshotReaders.note_late`."""
        with self._lock:
            for name in self._readers(snapshot):
                self._late.setdefault(name, deque(maxlen=MAX_LATE)).append(time.monotonic())

    def _is_late(self, replica: str) -> bool:
        times = self._late.get(replica)
        return times is not None and len(times) == MAX_LATE and times[0] > time.monotonic() - LATE_S

    def _readers(self, snapshot: int) -> set[str]:
        return {name for name, leased in self._leases.values() if leased == snapshot}


class SnapshotSource:
    """Everything that one rank offers. Thread-safe, with a single writer of the arena."""

    def __init__(self, arena: Arena, pieces: Sequence[ShardPiece]) -> None:
        self.arena = arena
        self.pending = PendingBoxes(())
        """Boxes that the present snapshot still lacks: a relay serves while it pulls."""
        self.deltas: DeltaSource = NoDeltas()
        self.device_memory: Callable[[int], SharedDeviceMemory | None] = _nowhere
        """Returns the memory of a device in which the snapshot of a slot stays, laid out as the slot."""
        self.readers = LateReaders()
        self.address = arena.address
        self.pieces = PiecesByName(pieces)
        self._lock = threading.Lock()
        self._caches: dict[int, DigestCache] = {}
        self._used: dict[int, set[str]] = {}
        self._read: dict[int, Counter[tuple[str, str]]] = {}
        """What was read of each snapshot, by reader and its incarnation."""

    def cache(self, snapshot: int) -> DigestCache:
        """Return the digest cache of a snapshot. Caches of snapshots that are gone are deleted."""
        with self._lock:
            for old in [old for old in self._caches if not self.arena.is_readable(old)]:
                del self._caches[old]
            return self._caches.setdefault(snapshot, DigestCache())

    def use(self, snapshot: int, ticket: str) -> None:
        """Note the use of a ticket. Raises WeightsError when it was used before."""
        with self._lock:
            for old in [old for old in self._used if not self.arena.is_readable(old)]:
                del self._used[old]
                self._read.pop(old, None)
            used = self._used.setdefault(snapshot, set())
            if ticket in used:
                raise WeightsError(f"The ticket for snapshot {snapshot} was used before: each one opens it once.")
            used.add(ticket)

    def charge(self, snapshot: int, proof: TicketProof, boxes: Sequence[ShardPiece]) -> None:
        """Note that boxes are read. Raises LastRefusalError if the reader, with all tickets of its incarnation for
        the snapshot, reads more than one allows: it would take bandwidth and time from others, and from the training in
        this process. The controller bounds the incarnations: a hello counts.
        """
        if proof.most_bytes is None:
            return
        with self._lock:
            read, reader = self._read.setdefault(snapshot, Counter()), (proof.reader, proof.incarnation)
            read[reader] += reading_cost(sum(box.size_bytes for box in boxes), len(boxes))
            if read[reader] > proof.most_bytes:
                raise LastRefusalError(f"{proof.reader} {SPENT}.")


def _always() -> bool:
    return True


class WaitingNotice:
    """The times at which the source of one connection says that it waits itself."""

    def __init__(self) -> None:
        self._number, self._due_at = -1, 0.0

    def is_due(self, number: int) -> bool:
        """Return whether to say so now of the oldest request that waits, which has this number."""
        now = time.monotonic()
        if number == self._number and now < self._due_at:
            return False
        is_first, self._number, self._due_at = number != self._number, number, now + WAITING_INTERVAL_S
        return not is_first


def _nowhere(_slot: int) -> None:
    return None


def _no_sizes() -> tuple[int, ...]:
    return ()


@dataclass(frozen=True)
class Grant:
    """The result of a granted request."""

    payload: tuple[Array, ...] = ()
    """For a `ReadBoxes`: for each box its elements as they lie in the snapshot, or its delta."""
    boxes: tuple[Array, ...] = ()
    """The boxes whose digests are part of the answer."""
    keys: tuple[DigestKey, ...] = ()
    cache: DigestCache | None = None
    bases: tuple[int, ...] = ()
    sizes: Callable[[], tuple[int, ...]] = _no_sizes
    """Computes the sizes of deltas."""
    ready: Callable[[], bool] = _always
    """Returns whether all boxes are there. Raises WeightsError when they will never be."""
    valid: Callable[[], bool] = _always
    """Returns whether the snapshot has not been revoked until now. Thread-safe."""

    def pack(
        self,
        groups: Sequence[Sequence[Array]],
        buffer: Memory,
        is_in_place: Callable[[Sequence[Array]], bool] = is_direct,
    ) -> list[Memory]:
        """Pack all of the payload as `memory.arrays.pack` does. Boxes are digested as they are copied, in the cache."""
        return pack(groups, buffer, is_in_place, self._copy)

    def _copy(self, index: int, place: Array, array: Array) -> None:
        copied = False

        def copy() -> bytes:
            nonlocal copied
            copied = True
            return digest_of_copy(place, array)

        if self.cache is not None and array is self.boxes[index] and self.keys[index][2] == "full":
            self.cache.get_or_compute(self.keys[index], copy)
        if not copied:
            np.copyto(place, array)

    def answer(self, number: int) -> SourceAnswer:
        """Return the answer, computing the digests that are not cached: call it after `pack`. Thread-safe once it is
        `ready`.

        It is a refusal if the snapshot was revoked meanwhile: the digests may be of other bits. Otherwise they are of
        the snapshot, and so is a payload that has them, whatever happens to the snapshot while it is sent.
        """
        answer = SourceAnswer(number=number, digests=self._digests(), bases=self.bases, sizes=self.sizes())
        return answer if self.valid() else refusal(number, REVOKED)

    def _digests(self) -> bytes:
        if self.cache is None:
            return b""
        return b"".join(
            b"" if key[2] == "off" else self.cache.get_or_compute(key, partial(digest_of_array, array, key[2], key[3]))
            for key, array in zip(self.keys, self.boxes, strict=True)
        )


class ReaderSession:
    """The lease of one connection, and the grants under it. Used by one thread at a time."""

    def __init__(self, source: SnapshotSource) -> None:
        self._source = source
        self._lease: ArenaMapping | None = None
        self._arrays: tuple[Array, ...] = ()
        self._snapshot = self._num_refused = 0
        self.reader = ""
        """The replica that has proven a ticket last; empty until one has."""
        self.memory: Memory = np.empty(0, np.uint8)
        """The opened snapshot in the arena's own mapping, which is the one that is registered and in huge pages."""
        self.device: SharedDeviceMemory | None = None
        """The opened snapshot in memory of a device, if it stays there."""

    @property
    def opened(self) -> bool:
        """Whether the reader has proven its ticket."""
        return self._snapshot > 0

    @property
    def proof(self) -> TicketProof:
        """The ticket that opened the snapshot."""
        assert self._lease is not None and self._lease.proof is not None  # noqa: PT018
        return self._lease.proof

    def grant(self, request: Request) -> Grant:
        """Carry out a request.

        Raises:
            WeightsError: refused; the message is for the reader, whose connection ends after a LastRefusalError.
        """
        try:
            return self._grant(request)
        except WeightsError as error:
            self._num_refused += self._lease is None or not self._lease.valid()
            if self._num_refused >= MAX_REFUSED:
                raise LastRefusalError(str(error)) from error
            raise

    def _grant(self, request: Request) -> Grant:
        if isinstance(request, OpenSnapshot):
            self._open(request)
            self._num_refused = 0  # a slow reader, whose leases were revoked, opens the next version
            return Grant(bases=self._source.deltas.bases(self._snapshot))
        if self._lease is None or not self._snapshot:
            raise WeightsError(NOT_OPENED)
        valid = self._lease.valid()
        if isinstance(request, ReleaseSnapshot):
            self.release()
        if not valid:
            raise WeightsError(REVOKED)
        if isinstance(request, ReleaseSnapshot):
            return Grant()
        self._source.charge(self._snapshot, self.proof, request.boxes)
        boxes = [(self._source.pieces.find(box), box.box) for box in request.boxes]
        if isinstance(request, MeasureDeltas):
            return self._measure_deltas(request, boxes)
        return self._read(request, boxes)

    def _read(self, request: ReadBoxes, boxes: Sequence[tuple[int, Box]]) -> Grant:
        pieces = self._source.pieces.pieces
        arrays = tuple(part_of(self._arrays[index], pieces[index].box, box) for index, box in boxes)
        salt = request.salt if request.digests == "sampled" else 0
        return Grant(
            payload=self._with_deltas(request, boxes, arrays) if request.encoded else arrays,
            boxes=arrays,
            keys=tuple((pieces[index].names[0], box, request.digests, salt) for index, box in boxes),
            cache=self._source.cache(self._snapshot),
            ready=self._arrival_check(boxes),
            valid=self._validity(),
        )

    def _with_deltas(
        self, request: ReadBoxes, boxes: Sequence[tuple[int, Box]], arrays: Sequence[Array]
    ) -> tuple[Array, ...]:
        payload: list[Array] = []
        for (index, box), array, size in zip(boxes, arrays, request.encoded, strict=True):
            if size:
                data = self._source.deltas.cached_delta(self._snapshot, index, box, request.base)
                if data is None or data.nbytes != size:
                    raise WeightsError(
                        f"Refused a delta of {size} bytes against version {request.base}: ask for its size first."
                    )
                payload.append(data)
            else:
                payload.append(array)
        return tuple(payload)

    def _measure_deltas(self, request: MeasureDeltas, boxes: Sequence[tuple[int, Box]]) -> Grant:
        deltas, snapshot, base = self._source.deltas, self._snapshot, request.base
        arrived = self._arrival_check(boxes)

        def sizes() -> tuple[int, ...]:
            data = (deltas.delta(snapshot, index, box, base) for index, box in boxes)
            return tuple(0 if delta is None else delta.nbytes for delta in data)

        def ready() -> bool:
            return deltas.ready(snapshot, boxes) and (arrived() or deltas.are_whole(snapshot, boxes))

        return Grant(sizes=sizes, ready=ready)

    def _arrival_check(self, boxes: Sequence[tuple[int, Box]]) -> Callable[[], bool]:
        lease, pending = self._lease, self._source.pending
        assert lease is not None
        left = deque(boxes)
        """Those of which it is not known that they have arrived: what has is there until the snapshot is revoked."""

        def ready() -> bool:
            if not lease.valid():
                raise WeightsError(REVOKED)
            while left and pending.has(*left[0]):
                left.popleft()
            return not left

        return ready

    def _validity(self) -> Callable[[], bool]:
        lease, snapshot = self._lease, self._snapshot
        assert lease is not None
        return lambda: lease.valid() and self._snapshot == snapshot

    def release(self) -> None:
        """Give the lease back."""
        self._arrays, self._snapshot, self.memory, self.device = (), 0, np.empty(0, np.uint8), None
        if self._lease is not None:
            self._lease.release()
        self._source.readers.returned(id(self))

    def close(self) -> None:
        """Give everything back; may be called twice."""
        self.release()
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    def _open(self, request: OpenSnapshot) -> None:
        self.release()
        if self._lease is None:
            self._lease = ArenaMapping(self._source.address)
        self._source.use(request.snapshot, self._lease.check(request.snapshot, request.proof).use)
        self._lease.open(request.snapshot, request.proof)
        self.reader = self.proof.reader
        self._source.readers.leased(id(self), self.reader, request.snapshot)
        slots = self._source.arena.slots
        slot = request.snapshot % len(slots)
        self.memory, self.device = slots[slot], self._source.device_memory(slot)
        self._arrays = packed_arrays(self._source.pieces.pieces, self.memory)
        self._snapshot = request.snapshot
