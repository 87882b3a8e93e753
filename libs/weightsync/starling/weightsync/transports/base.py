"""The interface of a transport: a server at the source, a client at the destination, and the client's events.

There is one `TransportServer` per publisher or relay, with threads of its own, and one `TransportClient` per transport
and puller, driven by the pulling thread, which waits in `poll` only. A failure of one source is an event, so it does
not end the reads from other sources.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starling.weightsync.memory.arrays import Array, Memory
from starling.weightsync.offers.offer import RankOffer
from starling.weightsync.offers.tickets import TicketProof
from starling.weightsync.transports.messages import Request, SourceAnswer


class TransportServer(Protocol):
    """Serves a `SnapshotSource` from threads of its own until closed."""

    address: str
    """Address that readers connect to."""
    failure: str
    """Why serving ended by itself; empty while it runs."""

    def wake(self) -> None:
        """Check again whether boxes or deltas that a reader waits for have arrived. Thread-safe."""

    def close(self, deadline_s: float) -> None:
        """End serving. Raises WeightsError when that takes longer than `deadline_s`."""


@dataclass(frozen=True)
class AnswerReceived:
    """A source has answered a request; the payload, if any, has arrived completely."""

    source: str
    answer: SourceAnswer
    placed: bool = False
    """Whether the boxes with a tensor in `ReadTarget.tensors` are there, and not in their arrays."""


@dataclass(frozen=True)
class ConnectionLost:
    """A connection broke: it must be dropped, and its requests will not be answered."""

    source: str
    reason: str


Event = AnswerReceived | ConnectionLost


@dataclass(frozen=True)
class ReadTarget:
    """Memory that the payload of a `ReadBoxes` fills."""

    arrays: Sequence[Array] = ()
    """For each requested box the array that it fills, any strides."""
    buffers: Sequence[Memory] = ()
    """For each segment contiguous memory to receive it in; the box itself where the segment is one contiguous box."""
    tensors: Sequence[Any] = ()
    """For each box the tensor of a device that it is for, None where it is for its array; empty where all are. A
    transport that reaches the device may fill the tensors instead of the arrays, of one request all or none."""


class TransportClient(Protocol):
    """Reads from sources over one transport. The caller names the sources."""

    scatters: bool
    """Whether payloads are written straight into `ReadTarget.arrays`, so that no buffers are needed."""

    def receives(self, kind: str) -> bool:
        """Return whether a buffer in `ReadTarget.buffers` may be flat memory of this kind of device, as torch names it.

        The box of such a buffer has its tensor in `ReadTarget.tensors`.
        """

    def connect(self, source: str, offer: RankOffer) -> None:
        """Begin to connect to a source rank.

        Raises:
            WeightsError: its address is malformed, or cannot be reached.
        """

    def ask(self, source: str, request: Request, target: ReadTarget, proof: TicketProof | None = None) -> None:
        """Send a request. The memory of `target` belongs to the transport until the answer or `drop`.

        `proof`: of the ticket, in an `OpenSnapshot`; its key encrypts what follows, where the offer says so.
        """

    def poll(self, wait_s: float) -> list[Event]:
        """Return the events since the last call, waiting for at most `wait_s` when there are none."""

    def wake(self) -> None:
        """End a `poll` that waits. Thread-safe."""

    def lanes(self, source: str) -> tuple[str, ...]:
        """Return the network paths that a connection really uses, for example ``cma/memory``."""

    def hang_up(self, source: str) -> None:
        """Begin to drop a connection, without waiting for its threads, if it has any. Unknown names are ignored."""

    def drop(self, source: str) -> None:
        """Close a connection by force. After it returns, no target of the connection is written. Unknown names are
        ignored."""

    def close(self) -> None:
        """Drop every connection; may be called twice and never raises."""


class EventQueue:
    """Events from a client's threads to its `poll`. Events of a dropped connection are discarded."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Event, threading.Event] | None] = queue.SimpleQueue()

    def put(self, event: Event, dropped: threading.Event) -> None:
        """Add an event of a connection, to be delivered unless `dropped` is set by then. Thread-safe."""
        self._queue.put((event, dropped))

    def poll(self, wait_s: float) -> list[Event]:
        """See `TransportClient.poll`."""
        events: list[Event] = []
        try:
            entry = self._queue.get(timeout=wait_s) if wait_s > 0 else self._queue.get_nowait()
            while True:
                if entry is not None and not entry[1].is_set():
                    events.append(entry[0])
                entry = self._queue.get_nowait()
        except queue.Empty:
            return events

    def wake(self) -> None:
        """See `TransportClient.wake`."""
        self._queue.put(None)
