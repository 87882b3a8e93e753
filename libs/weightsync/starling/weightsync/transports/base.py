"""What every transport offers a destination: connections to sources, requests on them, and the answers as they come.

One `TransportClient` per transport and puller, driven by the thread that pulls; it never waits but in `poll`.
Everything that
goes wrong with a source comes back as an event, so that one source's death does not end what others are doing.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from starling.weightsync.memory.arrays import Array, Memory
from starling.weightsync.plan.offer import RankOffer
from starling.weightsync.transports.messages import Request, SourceAnswer

PeerState = Literal["new", "connected", "opening", "open", "dead"]


@dataclass(frozen=True)
class AnswerReceived:
    """A source has answered a request, and the payload, if any, has arrived whole."""

    source: str
    answer: SourceAnswer


@dataclass(frozen=True)
class ConnectionLost:
    """A connection is gone and must be dropped; its requests will not be answered."""

    source: str
    reason: str


Event = AnswerReceived | ConnectionLost


@dataclass(frozen=True)
class ReadTarget:
    """Where the payload of a `Read` goes."""

    arrays: Sequence[Array] = ()
    """For each box asked for: what it fills, any strides."""
    buffers: Sequence[Memory] = ()
    """For each segment: contiguous memory to receive it in. Where the segment is one contiguous box that is the box."""


class EventQueue:
    """Events that threads report to who polls. What a dropped connection had to say is not heard any more."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Event, threading.Event] | None] = queue.SimpleQueue()

    def put(self, event: Event, dropped: threading.Event) -> None:
        """Report an event of a connection that lasts until `dropped`. Any thread may do it."""
        self._queue.put((event, dropped))

    def poll(self, wait_s: float) -> list[Event]:
        """See `TransportClient.poll`."""
        found: list[Event] = []
        try:
            entry = self._queue.get(timeout=wait_s) if wait_s > 0 else self._queue.get_nowait()
            while True:
                if entry is not None and not entry[1].is_set():
                    found.append(entry[0])
                entry = self._queue.get_nowait()
        except queue.Empty:
            return found

    def wake(self) -> None:
        """See `TransportClient.wake`."""
        self._queue.put(None)


class TransportClient(Protocol):
    """The destination's side of one transport. Sources are told apart by names of the caller's choice."""

    scatters: bool
    """Whether payloads are put straight into `ReadTarget.arrays`, so that no buffers are needed."""

    def connect(self, source: str, offer: RankOffer) -> None:
        """Begin a connection to a source rank.

        Raises:
            WeightsError: there can be none.
        """

    def ask(self, source: str, request: Request, landing: ReadTarget) -> None:
        """Send a request. What `landing` names belongs to the transport until it is answered or dropped."""

    def poll(self, wait_s: float) -> list[Event]:
        """Return what has happened, waiting for at most `wait_s` when nothing has."""

    def wake(self) -> None:
        """End a `poll` that waits. Any thread may call it."""

    def lanes(self, source: str) -> tuple[str, ...]:
        """Say over what a connection really runs."""

    def drop(self, source: str) -> None:
        """Close a connection by force. On return nothing is written to any landing of it. Unknown names are ignored."""

    def close(self) -> None:
        """Drop every connection; may be called twice and never raises."""


@dataclass
class SourceConnection:
    """A source that can be asked: its offer, its transport, and what is under way with it."""

    key: str
    offer: RankOffer
    wire: TransportClient
    state: PeerState = "new"
    reason: str = ""
    """Why it is dead."""
    bases: tuple[int, ...] = ()
    """Versions against which it may have deltas."""
    in_flight: int = 0
    """Buckets under way."""
    owes: int = 0
    """Answers that it owes."""
    heard: float = 0.0
    """When it last answered, or was first asked again after having answered everything."""

    def ask(self, request: Request, landing: ReadTarget) -> None:
        """Send a request."""
        if not self.owes:
            self.heard = time.monotonic()
        self.owes += 1
        self.wire.ask(self.key, request, landing)

    def answered(self) -> None:
        """Note an answer."""
        self.owes -= 1
        self.heard = time.monotonic()
