"""UCX client: one worker for all sources, driven by the pulling thread."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from starling.common.errors import WeightsError
from starling.weightsync.offers.offer import RankOffer
from starling.weightsync.offers.tickets import TicketProof
from starling.weightsync.transports.base import AnswerReceived, ConnectionLost, Event, ReadTarget
from starling.weightsync.transports.endpoints import IDLE_TIMEOUT_S, split_address
from starling.weightsync.transports.messages import (
    ANSWER_BYTES,
    OpenSnapshot,
    ReadBoxes,
    Request,
    SourceAnswer,
    decode_answer,
    encode_message,
)
from starling.weightsync.transports.sockets.nonblocking import NonBlockingChannel
from starling.weightsync.transports.ucx.protocol import ANSWER, REQUEST, WORKER, WORKER_BYTES
from starling.weightsync.transports.ucx.worker import UcxRequest, UcxWorker

log = logging.getLogger(__name__)


@dataclass
class _SentRequest:
    """A request that is not complete yet."""

    request: Request
    placed: bool = False
    """Whether it fills memory of a device."""
    arriving: deque[UcxRequest] = field(default_factory=deque)
    """Receives of the segments."""
    answer: SourceAnswer | None = None


@dataclass
class _Connection:
    """One source."""

    channel: NonBlockingChannel
    endpoint: Any = None
    """None until the source has accepted a ticket."""
    opening: int = 0
    """Number of the first `OpenSnapshot` while it is not answered."""
    held: list[tuple[Request, ReadTarget]] = field(default_factory=list)
    """Requests to be sent after that answer: only then it is known whether there is an endpoint to receive by."""
    sent: dict[int, _SentRequest] = field(default_factory=dict)
    waiting: dict[int, SourceAnswer] = field(default_factory=dict)
    """By number: that the source waits itself, to be reported by the next `poll`."""
    lanes: tuple[str, ...] = ()
    broken: bool = False
    """Whether its loss was reported."""


class UcxClient:
    """A `TransportClient` over UCX."""

    scatters = False

    def __init__(self, *, host: str) -> None:
        self._worker: UcxWorker | None = UcxWorker(host=host)
        self._connections: dict[str, _Connection] = {}
        self._told = False
        """Whether the log says that this UCX does not support the memory of a device."""

    def receives(self, kind: str) -> bool:
        """See `TransportClient.receives`."""
        assert self._worker is not None
        can = kind in self._worker.kinds
        if not can and not self._told:
            self._told = True
            log.warning("weights arrive by way of host memory: this UCX has no support for %r memory", kind)
        return can

    def connect(self, source: str, offer: RankOffer) -> None:
        """See `TransportClient.connect`."""
        assert self._worker is not None
        channel = NonBlockingChannel.dial(split_address(offer.address), max(ANSWER_BYTES, WORKER_BYTES))
        self._connections[source] = _Connection(channel)
        self._worker.watch(channel)
        _send(channel, WORKER, self._worker.address)

    def ask(self, source: str, request: Request, target: ReadTarget, proof: TicketProof | None = None) -> None:
        """See `TransportClient.ask`."""
        self._ask(self._connections[source], request, target)

    def poll(self, wait_s: float) -> list[Event]:
        """See `TransportClient.poll`."""
        assert self._worker is not None
        woken = self._worker.progress(0)
        events = self._events()
        if not events and not woken and wait_s > 0:
            self._worker.progress(wait_s)
            events = self._events()
        return events

    def wake(self) -> None:
        """See `TransportClient.wake`."""
        if self._worker is not None:
            self._worker.wake()

    def lanes(self, source: str) -> tuple[str, ...]:
        """See `TransportClient.lanes`."""
        connection = self._connections.get(source)
        if connection is None or connection.endpoint is None or self._worker is None:
            return ()
        if not connection.lanes:
            connection.lanes = self._worker.lanes(connection.endpoint)
            log.info("UCX reads from %s over %s", source, ", ".join(connection.lanes) or "unknown lanes")
        return connection.lanes

    def hang_up(self, source: str) -> None:
        """See `TransportClient.hang_up`: it has no threads."""

    def drop(self, source: str) -> None:
        """See `TransportClient.drop`."""
        connection = self._connections.pop(source, None)
        if connection is None or self._worker is None:
            return
        self._worker.unwatch(connection.channel)
        connection.channel.close()
        if connection.endpoint is None:
            return
        self._worker.hang_up(connection.endpoint)
        under_way = [operation for item in connection.sent.values() for operation in item.arriving]
        end = time.monotonic() + IDLE_TIMEOUT_S
        while not all(operation.completed for operation in under_way):
            self._worker.progress(0.001)
            if time.monotonic() > end:
                raise WeightsError("UCX does not release memory that it was given; end this process.")

    def close(self) -> None:
        """See `TransportClient.close`."""
        for source in list(self._connections):
            self.drop(source)
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def _ask(self, connection: _Connection, request: Request, target: ReadTarget) -> None:
        assert self._worker is not None
        if connection.opening:
            connection.held.append((request, target))
            return
        if isinstance(request, OpenSnapshot) and connection.endpoint is None:
            connection.opening = request.number
        sent = connection.sent[request.number] = _SentRequest(request, bool(target.tensors))
        if isinstance(request, ReadBoxes) and connection.endpoint is not None:
            for index, buffer in enumerate(target.buffers):
                filled = buffer if buffer.nbytes else np.empty(1, np.uint8)
                sent.arriving.append(self._worker.receive(connection.endpoint, filled, request.tag + index))
        _send(connection.channel, REQUEST, encode_message(request))

    def _events(self) -> list[Event]:
        assert self._worker is not None
        events: list[Event] = []
        for source, connection in self._connections.items():
            if connection.broken:
                continue
            try:
                events += [AnswerReceived(source, answer, placed) for answer, placed in self._advance(connection)]
            except (WeightsError, OSError, self._worker.error) as error:
                connection.broken = True
                self._worker.unwatch(connection.channel)
                reason = str(error) if isinstance(error, WeightsError) else f"{type(error).__name__}: {error}"
                events.append(ConnectionLost(source, reason))
        return events

    def _advance(self, connection: _Connection) -> list[tuple[SourceAnswer, bool]]:
        """Return the answers that are complete, and whether their requests have filled memory of a device.

        Raises WeightsError, OSError and UCXX's errors when it broke.
        """
        assert self._worker is not None
        connection.channel.flush()
        for kind, body in connection.channel.receive():
            self._handle(connection, kind, body)
        if connection.endpoint is not None:
            self._worker.check_alive(connection.endpoint)
        done = [(notice, False) for notice in connection.waiting.values()]
        connection.waiting = {}
        for number, item in list(connection.sent.items()):
            while item.arriving and item.arriving[0].completed:
                item.arriving.popleft().check()
            if item.answer is not None and not item.arriving:
                del connection.sent[number]
                done.append((item.answer, item.placed))
        return done

    def _handle(self, connection: _Connection, kind: int, body: bytes) -> None:
        """Handle a message from a source."""
        assert self._worker is not None
        if kind == WORKER and connection.endpoint is None:
            connection.endpoint = self._worker.connect(body)
            return
        if kind != ANSWER:
            raise WeightsError(f"the source sent {len(body)} bytes of kind {kind}")
        answer = decode_answer(body)
        item = connection.sent.get(answer.number)
        if item is None or item.answer is not None:
            raise WeightsError("the source answered another request")
        if answer.waiting:
            connection.waiting[answer.number] = answer
            return
        item.answer = answer
        if answer.number == connection.opening:
            connection.opening = 0
            held, connection.held = connection.held, []
            for request, target in held:
                self._ask(connection, request, target)


def _send(channel: NonBlockingChannel, kind: int, body: bytes) -> None:
    with contextlib.suppress(OSError):  # `poll` runs into it again, and reports it
        channel.send(kind, body)
