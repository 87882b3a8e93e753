"""What one rank lets others read: its snapshots, found by name and box, and their digests.

A `SnapshotSource` belongs to the process that holds the weights and is shared by all its servers; a `ReaderSession`
is one reader's
connection, whatever the transport. A session holds a lease on one snapshot at a time, and only for who has its token.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from starling.common.errors import WeightsError
from starling.weightsync.memory.arena import Arena, ArenaMapping
from starling.weightsync.memory.arrays import Array, Memory, is_direct, pack, packed_arrays, part_of
from starling.weightsync.memory.digests import DigestCache, DigestKey, digest_of_array, digest_of_copy
from starling.weightsync.plan.boxes import contains, intersection
from starling.weightsync.plan.layout import Box, ShardPiece, packed_offsets
from starling.weightsync.publisher.delta_history import DeltaSource, NoDeltas
from starling.weightsync.transports.messages import (
    MeasureDeltas,
    OpenSnapshot,
    ReadBoxes,
    ReleaseSnapshot,
    Request,
    SourceAnswer,
)

NOT_OPENED: Final = "Refused: open a snapshot with its token first."
REVOKED: Final = "The snapshot was revoked while it was read: too slow; pull a newer version."


class PiecesByName:
    """The pieces of one rank, by name."""

    def __init__(self, pieces: Sequence[ShardPiece]) -> None:
        self.pieces = tuple(pieces)
        _, self.extent_bytes = packed_offsets(piece.size_bytes for piece in self.pieces)
        """Room that the pieces take in a snapshot; their digests follow."""
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
    """Which boxes of a relay's snapshot are still to come. Thread-safe."""

    def __init__(self, missing: Iterable[tuple[int, Box]]) -> None:
        self._lock = threading.Lock()
        self._missing: dict[int, set[Box]] = {}
        for index, box in missing:
            self._missing.setdefault(index, set()).add(box)

    def arrived(self, index: int, box: Box) -> None:
        """Note that a box of a piece is there."""
        with self._lock:
            self._missing[index].discard(box)

    def has(self, index: int, box: Box) -> bool:
        """Whether all of `box`, a part of a piece, is there."""
        with self._lock:
            return all(intersection(box, missing) is None for missing in self._missing.get(index, ()))


class SnapshotSource:
    """Everything that one rank offers. Thread-safe, but for one writer of the arena."""

    def __init__(self, arena: Arena, pieces: Sequence[ShardPiece]) -> None:
        self.arena = arena
        self.arrivals = PendingBoxes(())
        """What the present snapshot still lacks: a relay serves while it pulls."""
        self.deltas: DeltaSource = NoDeltas()
        self.address = arena.address
        self.holding = PiecesByName(pieces)
        self._lock = threading.Lock()
        self._caches: dict[int, DigestCache] = {}

    def cache(self, snapshot: int) -> DigestCache:
        """Return the digests of a snapshot; those of snapshots that are gone are forgotten."""
        with self._lock:
            for old in [old for old in self._caches if not self.arena.stands(old)]:
                del self._caches[old]
            return self._caches.setdefault(snapshot, DigestCache())


def _always() -> bool:
    return True


def _nothing() -> tuple[int, ...]:
    return ()


@dataclass(frozen=True)
class Grant:
    """What a request was granted."""

    payload: tuple[Array, ...] = ()
    """Of a `ReadBoxes`: for each box its elements as they lie in the snapshot, or its delta."""
    boxes: tuple[Array, ...] = ()
    """The boxes whose digests are sent with it."""
    keys: tuple[DigestKey, ...] = ()
    cache: DigestCache | None = None
    bases: tuple[int, ...] = ()
    sizes: Callable[[], tuple[int, ...]] = _nothing
    """Finds out how large deltas are."""
    ready: Callable[[], bool] = _always
    """Whether all boxes are there. Raises WeightsError when they will never be."""

    def pack(
        self,
        groups: Sequence[Sequence[Array]],
        room: Memory,
        lies_ready: Callable[[Sequence[Array]], bool] = is_direct,
    ) -> list[Memory]:
        """As `memory.pack`, of all of the payload. What is packed is digested as it passes, still in the cache."""
        return pack(groups, room, lies_ready, self._copy)

    def _copy(self, index: int, place: Array, array: Array) -> None:
        copied = False

        def copy() -> bytes:
            nonlocal copied
            copied = True
            return digest_of_copy(place, array)

        if self.cache is not None and array is self.boxes[index] and self.keys[index][2] == "full":
            self.cache.of(self.keys[index], copy)
        if not copied:
            np.copyto(place, array)

    def answer(self, number: int) -> SourceAnswer:
        """Say what was asked, computing what is not known yet: best after `pack`. Any thread may do it, once it is
        `ready`."""
        return SourceAnswer(number=number, digests=self._digests(), bases=self.bases, sizes=self.sizes())

    def _digests(self) -> bytes:
        if self.cache is None:
            return b""
        return b"".join(
            b"" if key[2] == "off" else self.cache.of(key, partial(digest_of_array, array, key[2], key[3]))
            for key, array in zip(self.keys, self.boxes, strict=True)
        )


class ReaderSession:
    """What one connection may do. Used by one thread at a time."""

    def __init__(self, source: SnapshotSource) -> None:
        self._source = source
        self._lease: ArenaMapping | None = None
        self._arrays: tuple[Array, ...] = ()
        self._snapshot = 0
        self.memory: Memory = np.empty(0, np.uint8)
        """The opened snapshot, where the arena has it: this is the mapping that is registered, and in huge pages."""

    @property
    def opened(self) -> bool:
        """Whether the reader has presented a token."""
        return self._snapshot > 0

    def grant(self, request: Request) -> Grant:
        """Carry out a request.

        Raises:
            WeightsError: refused; the sentence is for the reader.
        """
        if isinstance(request, OpenSnapshot):
            self._open(request)
            return Grant(bases=self._source.deltas.bases(self._snapshot))
        if self._lease is None or not self._snapshot:
            raise WeightsError(NOT_OPENED)
        stands = self._lease.valid()
        if isinstance(request, ReleaseSnapshot):
            self.release()
        if not stands:
            raise WeightsError(REVOKED)
        if isinstance(request, ReleaseSnapshot):
            return Grant()
        found = [(self._source.holding.find(box), box.box) for box in request.boxes]
        if isinstance(request, MeasureDeltas):
            return self._compare(request, found)
        return self._read(request, found)

    def _read(self, request: ReadBoxes, found: Sequence[tuple[int, Box]]) -> Grant:
        holding = self._source.holding
        boxes = tuple(part_of(self._arrays[index], holding.pieces[index].box, box) for index, box in found)
        salt = request.salt if request.digests == "sampled" else 0
        return Grant(
            payload=self._encoded(request, found, boxes) if request.encoded else boxes,
            boxes=boxes,
            keys=tuple((holding.pieces[index].names[0], box, request.digests, salt) for index, box in found),
            cache=self._source.cache(self._snapshot),
            ready=self._arrived(found),
        )

    def _encoded(
        self, request: ReadBoxes, found: Sequence[tuple[int, Box]], boxes: Sequence[Array]
    ) -> tuple[Array, ...]:
        payload: list[Array] = []
        for (index, box), array, size in zip(found, boxes, request.encoded, strict=True):
            if size:
                data = self._source.deltas.known(self._snapshot, index, box, request.base)
                if data is None or data.nbytes != size:
                    raise WeightsError(
                        f"Refused a delta of {size} bytes against version {request.base}: ask for its size first."
                    )
                payload.append(data)
            else:
                payload.append(array)
        return tuple(payload)

    def _compare(self, request: MeasureDeltas, found: Sequence[tuple[int, Box]]) -> Grant:
        deltas, snapshot, base = self._source.deltas, self._snapshot, request.base
        arrived = self._arrived(found)

        def sizes() -> tuple[int, ...]:
            data = (deltas.of(snapshot, index, box, base) for index, box in found)
            return tuple(0 if delta is None else delta.nbytes for delta in data)

        return Grant(sizes=sizes, ready=lambda: deltas.ready(snapshot, found) and arrived())

    def _arrived(self, found: Sequence[tuple[int, Box]]) -> Callable[[], bool]:
        lease, arrivals = self._lease, self._source.arrivals
        assert lease is not None

        def ready() -> bool:
            if not lease.valid():
                raise WeightsError(REVOKED)
            return all(arrivals.has(index, box) for index, box in found)

        return ready

    def release(self) -> None:
        """Give the lease back."""
        self._arrays, self._snapshot, self.memory = (), 0, np.empty(0, np.uint8)
        if self._lease is not None:
            self._lease.release()

    def close(self) -> None:
        """Give everything back; may be called twice."""
        self.release()
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    def _open(self, request: OpenSnapshot) -> None:
        self._arrays, self._snapshot = (), 0
        if self._lease is None:
            self._lease = ArenaMapping(self._source.address)
        self._lease.open(request.snapshot, request.token)
        slots = self._source.arena.slots
        self.memory = slots[request.snapshot % len(slots)]
        self._arrays = packed_arrays(self._source.holding.pieces, self.memory)
        self._snapshot = request.snapshot
