"""Reading from the same host: map the source's arena and copy each box from where it lies to where it belongs.

One copy, whatever the strides, and no work for the source: one that dies or stops meanwhile disturbs nobody. The digest
of a box is taken over the source's memory as it passes, while it is in the cache; where a box is a whole piece it must
be the digest that the publisher put beside it.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from starling.common.errors import WeightsError
from starling.weightsync.memory.arena import ArenaMapping
from starling.weightsync.memory.arrays import Array, Memory, chunks_of, packed_arrays, part_of
from starling.weightsync.memory.digests import Hasher, digest_of_array
from starling.weightsync.plan.offer import DIGEST_BYTES, RankOffer
from starling.weightsync.transports.base import AnswerReceived, Event, EventQueue, ReadTarget
from starling.weightsync.transports.messages import (
    OpenSnapshot,
    ReadBoxes,
    ReleaseSnapshot,
    Request,
    SourceAnswer,
    refusal,
)
from starling.weightsync.transports.source import NOT_OPENED, REVOKED, PiecesByName


@dataclass
class _Connection:
    mapping: ArenaMapping
    holding: PiecesByName
    memory: Memory | None = None
    arrays: tuple[Array, ...] = ()
    jobs: set[Future[SourceAnswer]] = field(default_factory=set)
    dropped: threading.Event = field(default_factory=threading.Event)


class LocalClient:
    """A `Wire` through shared memory. Copies run in the threads of `pool`."""

    scatters = True

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._connections: dict[str, _Connection] = {}
        self._events = EventQueue()

    def connect(self, source: str, offer: RankOffer) -> None:
        """See `Wire.connect`."""
        mapping = ArenaMapping(offer.address)
        self._connections[source] = _Connection(mapping, PiecesByName(mapping.pieces()))

    def ask(self, source: str, request: Request, landing: ReadTarget) -> None:
        """See `Wire.ask`."""
        connection = self._connections[source]
        if isinstance(request, ReadBoxes):
            job = self._pool.submit(_read, connection, request, landing)
            connection.jobs.add(job)
            job.add_done_callback(lambda done: self._done(source, connection, request.number, done))
            return
        try:
            if isinstance(request, OpenSnapshot):
                connection.memory = connection.mapping.open(request.snapshot, request.token)
                connection.arrays = packed_arrays(connection.holding.pieces, connection.memory)
            elif isinstance(request, ReleaseSnapshot):
                _check(connection)
                _forget(connection)
        except WeightsError as error:
            _forget(connection)
            self._events.put(AnswerReceived(source, refusal(request.number, str(error))), connection.dropped)
        else:
            self._events.put(AnswerReceived(source, SourceAnswer(number=request.number)), connection.dropped)

    def poll(self, wait_s: float) -> list[Event]:
        """See `Wire.poll`."""
        return self._events.poll(wait_s)

    def wake(self) -> None:
        """See `Wire.wake`."""
        self._events.wake()

    def lanes(self, source: str) -> tuple[str, ...]:
        """See `Wire.lanes`."""
        return ("shared memory",)

    def drop(self, source: str) -> None:
        """See `Wire.drop`."""
        connection = self._connections.pop(source, None)
        if connection is None:
            return
        connection.dropped.set()
        for job in list(connection.jobs):
            if not job.cancel():
                job.exception()  # it ends after the chunk in hand
        _forget(connection)
        connection.mapping.close()

    def close(self) -> None:
        """See `Wire.close`."""
        for source in list(self._connections):
            self.drop(source)

    def _done(self, source: str, connection: _Connection, number: int, job: Future[SourceAnswer]) -> None:
        connection.jobs.discard(job)
        if job.cancelled():
            return
        error = job.exception()
        answer = job.result() if error is None else refusal(number, str(error))
        self._events.put(AnswerReceived(source, answer), connection.dropped)


def _check(connection: _Connection) -> None:
    if connection.memory is None:
        raise WeightsError(NOT_OPENED)
    if not connection.mapping.valid():
        raise WeightsError(REVOKED)


def _forget(connection: _Connection) -> None:
    connection.memory, connection.arrays = None, ()
    connection.mapping.release()


def _read(connection: _Connection, request: ReadBoxes, landing: ReadTarget) -> SourceAnswer:
    _check(connection)
    memory = connection.memory
    assert memory is not None
    found: list[bytes] = []
    for box, target in zip(request.boxes, landing.arrays, strict=True):
        index = connection.holding.find(box)
        piece = connection.holding.pieces[index]
        source = part_of(connection.arrays[index], piece.box, box.box)
        if request.digests == "full":
            digest = _copy(connection, source, target, digest=True)
            if box.box == piece.box and connection.mapping.digested():
                _compare(connection.holding, memory, index, digest)
            found.append(digest)
        else:
            _copy(connection, source, target, digest=False)
            found.append(digest_of_array(source, request.digests, request.salt))
    _check(connection)
    return SourceAnswer(number=request.number, digests=b"".join(found))


def _copy(connection: _Connection, source: Array, target: Array, *, digest: bool) -> bytes:
    """Copy a box chunk by chunk, and digest each chunk while it is in the cache."""
    hasher = Hasher()
    for index in chunks_of(source):
        if connection.dropped.is_set():
            raise WeightsError("The connection was dropped.")
        taken, filled = source[index], target[index]
        np.copyto(filled, taken)
        if digest:
            hasher.update(taken if taken.flags.c_contiguous else filled)
    return hasher.digest() if digest else b""


def _compare(holding: PiecesByName, memory: Memory, index: int, digest: bytes) -> None:
    """Raise unless the digest is the one that the publisher put beside the piece."""
    begin = holding.extent_bytes + index * DIGEST_BYTES
    if memory[begin : begin + DIGEST_BYTES].tobytes() != digest:
        piece = holding.pieces[index]
        raise WeightsError(f"Box {piece.box} of {piece.names[0]} has another digest than when it was published.")
