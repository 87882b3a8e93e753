"""Shared memory: the reader maps the source's arena and copies each box in place.

One copy, whatever the strides, and no work for the source: whether it dies or stops meanwhile does not matter. The
digest of a box is computed over the source's memory during the copy, while it is in the cache; where a box is a whole
piece it must equal the digest that the publisher stored with the piece.

A snapshot that stays in memory of a device is copied from there to boxes on a device that reaches it, over the plan's
strides too. No bytes pass by a processor then: the digests are those of the snapshot in the arena, and the attestation
compares them with what has arrived.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from starling.common.errors import WeightsError
from starling.weightsync.memory.arena import ArenaMapping
from starling.weightsync.memory.arrays import Array, Memory, chunks_of, packed_arrays, part_of
from starling.weightsync.memory.device_handles import OpenedMemory
from starling.weightsync.memory.digests import Hasher, digest_of_array
from starling.weightsync.offers.offer import DIGEST_BYTES, RankOffer
from starling.weightsync.offers.tickets import TicketProof
from starling.weightsync.plan.layout import ShardPiece
from starling.weightsync.transports.base import AnswerReceived, Event, EventQueue, ReadTarget
from starling.weightsync.transports.device_copies import DeviceCopy
from starling.weightsync.transports.messages import (
    OpenSnapshot,
    ReadBoxes,
    ReleaseSnapshot,
    Request,
    SourceAnswer,
    refusal,
)
from starling.weightsync.transports.source import NOT_OPENED, REVOKED, PiecesByName, SnapshotSource


class _Filled(NamedTuple):
    """What a read has filled."""

    answer: SourceAnswer
    placed: bool = False
    """As in `AnswerReceived`."""


@dataclass
class _Connection:
    mapping: ArenaMapping
    pieces: PiecesByName
    memory: Memory | None = None
    arrays: tuple[Array, ...] = ()
    device: DeviceCopy | None = None
    jobs: set[Future[_Filled]] = field(default_factory=set)
    dropped: threading.Event = field(default_factory=threading.Event)


class LocalServer:
    """A `TransportServer` that only collapses the arena into huge pages, in a thread: its readers map the arena."""

    def __init__(self, source: SnapshotSource) -> None:
        self.address, self.failure = source.address, ""
        self._stop = threading.Event()
        # Not in the publisher's digesting thread: the first digests would wait for it, a second for each few GiB.
        self._thread = threading.Thread(
            target=source.arena.collapse, args=(self._stop.is_set,), name="weightsync-pages", daemon=True
        )
        self._thread.start()

    def wake(self) -> None:
        """See `TransportServer.wake`: no reader waits in this process."""

    def close(self, deadline_s: float) -> None:
        """See `TransportServer.close`."""
        self._stop.set()
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise WeightsError(f"The thread that collapses snapshots did not end within {deadline_s:g} s.")


class LocalClient:
    """A `TransportClient` through shared memory. Copies run in the threads of `pool`."""

    scatters = True

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._connections: dict[str, _Connection] = {}
        self._events = EventQueue()

    def receives(self, kind: str) -> bool:
        """See `TransportClient.receives`: it needs no buffers."""
        return False

    def connect(self, source: str, offer: RankOffer) -> None:
        """See `TransportClient.connect`."""
        mapping = ArenaMapping(offer.address)
        try:
            pieces = PiecesByName(mapping.pieces())
        except WeightsError:
            mapping.close()
            raise
        self._connections[source] = _Connection(mapping, pieces)

    def ask(self, source: str, request: Request, target: ReadTarget, proof: TicketProof | None = None) -> None:
        """See `TransportClient.ask`."""
        connection = self._connections[source]
        if isinstance(request, ReadBoxes):
            job = self._pool.submit(_read, connection, request, target)
            connection.jobs.add(job)
            job.add_done_callback(lambda done: self._done(source, connection, request.number, done))
            return
        try:
            if isinstance(request, OpenSnapshot):
                connection.memory = connection.mapping.open(request.snapshot, request.proof)
                connection.arrays = packed_arrays(connection.pieces.pieces, connection.memory)
                connection.device = DeviceCopy(connection.mapping, connection.pieces.extent_bytes)
            elif isinstance(request, ReleaseSnapshot):
                _check(connection)
                _release(connection)
        except WeightsError as error:
            _release(connection)
            self._events.put(AnswerReceived(source, refusal(request.number, str(error))), connection.dropped)
        else:
            self._events.put(AnswerReceived(source, SourceAnswer(number=request.number)), connection.dropped)

    def poll(self, wait_s: float) -> list[Event]:
        """See `TransportClient.poll`."""
        return self._events.poll(wait_s)

    def wake(self) -> None:
        """See `TransportClient.wake`."""
        self._events.wake()

    def lanes(self, source: str) -> tuple[str, ...]:
        """See `TransportClient.lanes`."""
        connection = self._connections.get(source)
        device = "" if connection is None or connection.device is None else connection.device.lane
        return ("shared memory", device) if device else ("shared memory",)

    def hang_up(self, source: str) -> None:
        """See `TransportClient.hang_up`."""
        connection = self._connections.get(source)
        if connection is not None:
            connection.dropped.set()

    def drop(self, source: str) -> None:
        """See `TransportClient.drop`."""
        connection = self._connections.pop(source, None)
        if connection is None:
            return
        connection.dropped.set()
        for job in list(connection.jobs):
            if not job.cancel():
                job.exception()  # it ends after the current chunk
        _release(connection)
        connection.mapping.close()

    def close(self) -> None:
        """See `TransportClient.close`."""
        for source in list(self._connections):
            self.drop(source)

    def _done(self, source: str, connection: _Connection, number: int, job: Future[_Filled]) -> None:
        connection.jobs.discard(job)
        if job.cancelled():
            return
        error = job.exception()
        filled = job.result() if error is None else _Filled(refusal(number, str(error)))
        self._events.put(AnswerReceived(source, filled.answer, filled.placed), connection.dropped)


def _check(connection: _Connection) -> None:
    if connection.memory is None:
        raise WeightsError(NOT_OPENED)
    if not connection.mapping.valid():
        raise WeightsError(REVOKED)


def _release(connection: _Connection) -> None:
    connection.memory, connection.arrays = None, ()
    device, connection.device = connection.device, None
    if device is not None:
        device.close()
    connection.mapping.release()


def _read(connection: _Connection, request: ReadBoxes, target: ReadTarget) -> _Filled:
    _check(connection)
    device = connection.device
    assert device is not None
    places = _places(target)
    copy = device.memory_for(places)
    if copy is not None:
        digests = _copy_on_device(connection, request, copy, places)
    else:
        digests = _copy_from_host(connection, request, target)
    _check(connection)
    return _Filled(SourceAnswer(number=request.number, digests=b"".join(digests)), copy is not None)


def _places(target: ReadTarget) -> list[Any]:
    """Return what each box is for: a tensor of a device, or else its array."""
    pairs = itertools.zip_longest(target.arrays, target.tensors)
    return [array if tensor is None else tensor for array, tensor in pairs]


def _copy_on_device(
    connection: _Connection, request: ReadBoxes, memory: OpenedMemory, places: Sequence[Any]
) -> list[bytes]:
    """Copy boxes within the device, or from one to another, and return their digests."""
    pieces = connection.pieces
    indices = [pieces.find(box) for box in request.boxes]
    with memory.copying() as copy:
        for index, box, place in zip(indices, request.boxes, places, strict=True):
            if connection.dropped.is_set():
                raise WeightsError("The connection was dropped.")
            copy(pieces.pieces[index], pieces.offsets[index], box.box, place)
    return [
        _digest_in_arena(connection, request, index, box) for index, box in zip(indices, request.boxes, strict=True)
    ]


def _digest_in_arena(connection: _Connection, request: ReadBoxes, index: int, box: ShardPiece) -> bytes:
    """Return the digest of a box of the opened snapshot: the stored one of a whole piece, else a computed one."""
    piece, memory = connection.pieces.pieces[index], connection.memory
    assert memory is not None
    if request.digests == "full" and box.box == piece.box and connection.mapping.digested():
        return _stored_digest(connection.pieces, memory, index)
    return digest_of_array(part_of(connection.arrays[index], piece.box, box.box), request.digests, request.salt)


def _copy_from_host(connection: _Connection, request: ReadBoxes, target: ReadTarget) -> list[bytes]:
    """Copy boxes from the arena to their arrays, and return their digests."""
    memory = connection.memory
    assert memory is not None
    digests: list[bytes] = []
    for box, array in zip(request.boxes, target.arrays, strict=True):
        index = connection.pieces.find(box)
        piece = connection.pieces.pieces[index]
        source = part_of(connection.arrays[index], piece.box, box.box)
        if request.digests == "full":
            digest = _copy(connection, source, array, digest=True)
            if box.box == piece.box and connection.mapping.digested():
                _check_digest(connection.pieces, memory, index, digest)
            digests.append(digest)
        else:
            _copy(connection, source, array, digest=False)
            digests.append(digest_of_array(source, request.digests, request.salt))
    return digests


def _copy(connection: _Connection, source: Array, target: Array, *, digest: bool) -> bytes:
    """Copy a box chunk by chunk, digesting each chunk while it is in the cache."""
    hasher = Hasher()
    for index in chunks_of(source):
        if connection.dropped.is_set():
            raise WeightsError("The connection was dropped.")
        read, filled = source[index], target[index]
        np.copyto(filled, read)
        if digest:
            hasher.update(read if read.flags.c_contiguous else filled)
    return hasher.digest() if digest else b""


def _check_digest(held: PiecesByName, memory: Memory, index: int, digest: bytes) -> None:
    """Raise unless the digest equals the one that the publisher stored with the piece."""
    if _stored_digest(held, memory, index) != digest:
        piece = held.pieces[index]
        raise WeightsError(f"Box {piece.box} of {piece.names[0]} has another digest than when it was published.")


def _stored_digest(held: PiecesByName, memory: Memory, index: int) -> bytes:
    begin = held.extent_bytes + index * DIGEST_BYTES
    return memory[begin : begin + DIGEST_BYTES].tobytes()
