"""Socket client: two threads per connection, so that requests are sent ahead of the answers.

Only after an `OpenSnapshot` nothing is sent until it is answered: a carrier may need the channel for itself then.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Final

from starling.common.errors import WeightsError
from starling.weightsync.offers.offer import RankOffer
from starling.weightsync.offers.tickets import TicketProof
from starling.weightsync.transports.base import AnswerReceived, ConnectionLost, Event, EventQueue, ReadTarget
from starling.weightsync.transports.endpoints import LONGEST_WAIT_S, WAITING_INTERVAL_S, split_address
from starling.weightsync.transports.messages import (
    ANSWER_BYTES,
    OpenSnapshot,
    ReadBoxes,
    Request,
    SourceAnswer,
    decode_answer,
)
from starling.weightsync.transports.sockets.carrier import MakeCarrier, PayloadCarrier
from starling.weightsync.transports.sockets.channel import Channel, ChannelStopped, connect, framed
from starling.weightsync.transports.sockets.records import channel_keys


class _Connection:
    """One channel to a source, with the threads that send and receive on it."""

    def __init__(
        self, name: str, address: tuple[str, int], make_carrier: MakeCarrier, events: EventQueue, *, encrypted: bool
    ) -> None:
        self._name, self._address, self._make_carrier, self._events = name, address, make_carrier, events
        self.encrypted: Final = encrypted
        self._stop = threading.Event()
        self._connected = threading.Event()
        self._open_answered = threading.Event()
        """Set while no `OpenSnapshot` waits for its answer."""
        self._expected: queue.SimpleQueue[tuple[Request, ReadTarget, TicketProof | None]] = queue.SimpleQueue()
        self._outgoing: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._ends: tuple[Channel, PayloadCarrier] | None = None
        self._lock = threading.Lock()
        self._loss_reported = threading.Lock()  # acquired by the thread that reports the loss
        self._threads = [
            threading.Thread(target=self._guard, args=(run,), name="weightsync-pull", daemon=True)
            for run in (self._receive, self._send)
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, request: Request, target: ReadTarget, proof: TicketProof | None) -> None:
        self._expected.put((request, target, proof))
        self._outgoing.put(request)

    def hang_up(self) -> None:
        self._stop.set()
        self._outgoing.put(None)
        with self._lock:
            if self._ends is not None:
                self._ends[0].hang_up()

    def drop(self) -> None:
        self.hang_up()
        with self._lock:
            if self._ends is not None:
                self._ends[1].close()
        for thread in self._threads:
            thread.join()  # every wait in them is short
        if self._ends is not None:
            self._ends[0].close()

    def _guard(self, run: Callable[[], None]) -> None:
        try:
            run()
        except ChannelStopped:
            pass
        except (OSError, WeightsError) as error:
            self._connected.set()
            if not self._stop.is_set() and self._loss_reported.acquire(blocking=False):
                self._events.put(ConnectionLost(self._name, f"{error.__class__.__name__}: {error}"), self._stop)

    def _send(self) -> None:
        channel = connect(self._address, self._stop)
        with self._lock:
            self._ends = channel, self._make_carrier(channel)
        self._connected.set()
        while not self._stop.is_set():
            request = self._outgoing.get()
            if request is None:
                continue
            if isinstance(request, OpenSnapshot):
                self._open_answered.clear()
            channel.send([framed(request)])
            while isinstance(request, OpenSnapshot) and not self._open_answered.wait(LONGEST_WAIT_S):
                if self._stop.is_set():
                    return

    def _receive(self) -> None:
        while not self._connected.wait(LONGEST_WAIT_S):
            if self._stop.is_set():
                return
        if self._ends is None:
            return
        channel, carrier = self._ends
        while not self._stop.is_set():
            try:
                request, target, proof = self._expected.get(timeout=LONGEST_WAIT_S)
            except queue.Empty:
                continue
            answer = self._answer(channel, request.number)
            if isinstance(request, ReadBoxes) and not answer.reason:
                carrier.receive(target.buffers)
            if isinstance(request, OpenSnapshot):
                if not answer.reason:
                    if self.encrypted and proof is not None:
                        keys = channel_keys(proof)
                        channel.encrypt(sending=keys.from_reader, receiving=keys.from_source)
                    carrier.opened()
                self._open_answered.set()
            self._events.put(AnswerReceived(self._name, answer), self._stop)

    def _answer(self, channel: Channel, number: int) -> SourceAnswer:
        """Return the next answer, which must be of this request; report now and then that the source waits."""
        reported_at = 0.0
        while True:
            answer = decode_answer(channel.receive_message(ANSWER_BYTES))
            if answer.number != number:
                raise WeightsError("the source answered another request")
            if not answer.waiting:
                return answer
            if time.monotonic() - reported_at >= WAITING_INTERVAL_S / 2:  # else a source could fill the queue
                reported_at = time.monotonic()
                self._events.put(AnswerReceived(self._name, answer), self._stop)


class SocketClient:
    """A `TransportClient` with a socket to each source.

    Args:
        lane: name of the network path, for reports.
        make_carrier: makes the payload carrier of a new connection.
    """

    scatters = False

    def __init__(self, lane: str, make_carrier: MakeCarrier) -> None:
        self._lane, self._make_carrier = lane, make_carrier
        self._connections: dict[str, _Connection] = {}
        self._events = EventQueue()

    def receives(self, kind: str) -> bool:
        """See `TransportClient.receives`: sockets fill memory of the host."""
        return False

    def connect(self, source: str, offer: RankOffer) -> None:
        """See `TransportClient.connect`."""
        address = split_address(offer.address)
        self._connections[source] = _Connection(
            source, address, self._make_carrier, self._events, encrypted=offer.encrypted
        )

    def ask(self, source: str, request: Request, target: ReadTarget, proof: TicketProof | None = None) -> None:
        """See `TransportClient.ask`."""
        self._connections[source].ask(request, target, proof)

    def poll(self, wait_s: float) -> list[Event]:
        """See `TransportClient.poll`."""
        return self._events.poll(wait_s)

    def wake(self) -> None:
        """See `TransportClient.wake`."""
        self._events.wake()

    def lanes(self, source: str) -> tuple[str, ...]:
        """See `TransportClient.lanes`."""
        connection = self._connections.get(source)
        if connection is None:
            return ()
        return (f"{self._lane}+aes-gcm" if connection.encrypted else self._lane,)

    def hang_up(self, source: str) -> None:
        """See `TransportClient.hang_up`."""
        connection = self._connections.get(source)
        if connection is not None:
            connection.hang_up()

    def drop(self, source: str) -> None:
        """See `TransportClient.drop`."""
        connection = self._connections.pop(source, None)
        if connection is not None:
            connection.drop()

    def close(self) -> None:
        """See `TransportClient.close`."""
        for connection in self._connections.values():
            connection.hang_up()
        for source in list(self._connections):
            self.drop(source)
