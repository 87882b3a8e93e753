"""UCX client: one worker for all sources, driven by the pulling thread."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from starling.common.errors import WeightsError
from starling.weightsync.memory.arrays import Memory
from starling.weightsync.plan.offer import RankOffer
from starling.weightsync.transports.base import AnswerReceived, ConnectionLost, Event, ReadTarget
from starling.weightsync.transports.endpoints import IDLE_TIMEOUT_S, split_address
from starling.weightsync.transports.messages import (
    ANSWER_BYTES,
    LENGTH,
    ReadBoxes,
    Request,
    SourceAnswer,
    decode_answer,
    without_length,
)
from starling.weightsync.transports.ucx.protocol import ANSWER_TAGS, NAME_BYTES, WELCOME, WELCOME_TAG, encoded
from starling.weightsync.transports.ucx.worker import UcxRequest, UcxWorker

log = logging.getLogger(__name__)


@dataclass
class _SentRequest:
    """A request that is not answered yet."""

    request: Request
    answer: Memory
    arriving: deque[UcxRequest]
    """Receives of the segments, then of the answer."""


@dataclass
class _Connection:
    """One source."""

    endpoint: Any
    name: bytes
    tag: int = 0
    """Tag of requests; 0 before the source's welcome."""
    sends: deque[UcxRequest] = field(default_factory=deque)
    sent: dict[int, _SentRequest] = field(default_factory=dict)
    lanes: tuple[str, ...] = ()


class UcxClient:
    """A `TransportClient` over UCX."""

    scatters = False

    def __init__(self, *, host: str) -> None:
        self._worker: UcxWorker | None = UcxWorker(host=host)
        self._connections: dict[str, _Connection] = {}
        self._welcome: Memory = np.empty(WELCOME.size, np.uint8)
        self._welcome_receive: UcxRequest | None = None

    def connect(self, source: str, offer: RankOffer) -> None:
        """See `TransportClient.connect`."""
        assert self._worker is not None
        address, _, name = offer.address.partition("/")
        host, port = split_address(address)
        if len(name) != 2 * NAME_BYTES:
            raise WeightsError(f"{offer.address!r} is not an address of the form host:port/name.")
        try:
            endpoint = self._worker.lib.UCXEndpoint.create(self._worker.worker, host, port, True)
        except self._worker.error as error:
            raise WeightsError(f"No connection to {address}: {error}.") from error
        self._connections[source] = _Connection(endpoint, bytes.fromhex(name))

    def ask(self, source: str, request: Request, target: ReadTarget) -> None:
        """See `TransportClient.ask`."""
        assert self._worker is not None
        connection = self._connections[source]
        answer: Memory = np.empty(ANSWER_BYTES + LENGTH.size, np.uint8)
        arriving: deque[UcxRequest] = deque()
        if isinstance(request, ReadBoxes):
            for index, buffer in enumerate(target.buffers):
                filled = buffer if buffer.nbytes else np.empty(1, np.uint8)
                arriving.append(self._worker.receive(connection.endpoint, filled, request.tag + index))
        arriving.append(self._worker.receive(connection.endpoint, answer, ANSWER_TAGS | request.number))
        connection.sent[request.number] = _SentRequest(request, answer, arriving)
        if connection.tag:
            connection.sends.append(self._worker.send(connection.endpoint, encoded(request), connection.tag))

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
        if connection is None or self._worker is None:
            return ()
        if not connection.lanes:
            connection.lanes = self._worker.lanes(connection.endpoint)
            log.info("UCX reads from %s over %s", source, ", ".join(connection.lanes) or "unknown lanes")
        return connection.lanes

    def drop(self, source: str) -> None:
        """See `TransportClient.drop`."""
        connection = self._connections.pop(source, None)
        if connection is None or self._worker is None:
            return
        self._worker.hang_up(connection.endpoint)
        arriving = (operation for item in connection.sent.values() for operation in item.arriving)
        under_way = [*connection.sends, *arriving]
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

    def _events(self) -> list[Event]:
        self._receive_welcomes()
        events: list[Event] = []
        for source, connection in self._connections.items():
            try:
                events += [AnswerReceived(source, answer) for answer in self._advance(connection)]
            except WeightsError as error:
                events.append(ConnectionLost(source, str(error)))
        return events

    def _receive_welcomes(self) -> None:
        """Learn the tags of newly connected sources, and send them the requests that waited for it."""
        assert self._worker is not None
        while True:
            if self._welcome_receive is None:
                if not any(not connection.tag for connection in self._connections.values()):
                    return
                self._welcome_receive = self._worker.receive_any(self._welcome, WELCOME_TAG)
            if not self._welcome_receive.completed:
                return
            self._welcome_receive = None
            name, tag = WELCOME.unpack(self._welcome.data)
            for connection in self._connections.values():
                if connection.name == name:
                    connection.tag = tag
                    for item in connection.sent.values():
                        connection.sends.append(self._worker.send(connection.endpoint, encoded(item.request), tag))

    def _advance(self, connection: _Connection) -> Sequence[SourceAnswer]:
        """Return the answers that are complete. Raises WeightsError when the connection broke."""
        assert self._worker is not None
        done: list[SourceAnswer] = []
        try:
            self._worker.check_alive(connection.endpoint)
            while connection.sends and connection.sends[0].completed:
                connection.sends.popleft().check()
            for number, item in list(connection.sent.items()):
                while item.arriving and item.arriving[0].completed:
                    item.arriving.popleft().check()
                if not item.arriving:
                    del connection.sent[number]
                    done.append(decode_answer(without_length(item.answer.data)))
        except self._worker.error as error:
            raise WeightsError(f"{type(error).__name__}: {error}") from error
        return done
