"""NIXL client: one-sided reads of what a source has granted.

Requests and answers go over a socket. A source that grants a `ReadBoxes` answers with the location of its segments,
contiguous boxes in the snapshot itself and the others packed, and the reader fetches them into place without the
source's help. Then the reader confirms it, and the source reuses the packing buffer. A source registers its snapshots
and its packing buffer, no other memory, and sends the metadata to read them only after it has granted a read.

The reader reads, rather than the source writing, because only then the reader controls its own memory: a source that
was stopped and therefore dropped cannot write into it later. The price: the key that comes with the first granted read
opens all snapshots of that source for as long as it serves, whatever their tokens. Over TCP UCX needs no key at all.
Readers and sources must trust each other.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from starling.common.errors import WeightsError
from starling.common.wakeup import Wakeup
from starling.weightsync.offers.offer import RankOffer
from starling.weightsync.offers.tickets import TicketProof
from starling.weightsync.transports.base import AnswerReceived, ConnectionLost, Event, ReadTarget
from starling.weightsync.transports.endpoints import split_address
from starling.weightsync.transports.messages import (
    ANSWER_BYTES,
    ReadBoxes,
    Request,
    SourceAnswer,
    decode_answer,
    decode_checked,
    encode_message,
)
from starling.weightsync.transports.nixl.agent import LONGEST_TICK_S, TICK_S, NixlAgent, NixlRead, RemoteBlock
from starling.weightsync.transports.nixl.protocol import (
    ANSWER,
    FETCHED,
    HOST,
    LOCATION,
    LOCATION_BYTES,
    NUMBER,
    REQUEST,
    PayloadLocation,
)
from starling.weightsync.transports.sockets.nonblocking import NonBlockingChannel

DRAIN_S: Final = 0.25
"""How long reads of a dropped connection may take to end before their agent is closed."""

_locations: Final = msgspec.msgpack.Decoder(PayloadLocation)


@dataclass
class _SentRequest:
    """A request that is not answered yet."""

    request: Request
    target: ReadTarget
    blocks: tuple[RemoteBlock, ...] | None = None
    """For each segment the memory that it fills and its address at the source, once that is known."""
    read: NixlRead | None = None
    answer: SourceAnswer | None = None


@dataclass
class _Connection:
    """One source."""

    channel: NonBlockingChannel
    agent: str = ""
    """Name of its agent, once its metadata is known."""
    metadata: bytes = b""
    sent: dict[int, _SentRequest] = field(default_factory=dict)
    waiting: dict[int, SourceAnswer] = field(default_factory=dict)
    """By number: that the source waits itself, to be reported by the next `poll`."""
    fault: str = ""
    """Why it can no longer be read, to be reported by the next `poll`."""
    broken: bool = False
    """Whether its loss was reported."""


class NixlClient:
    """A `TransportClient` over NIXL: one agent for all sources, replaced when reads of a dropped source continue."""

    scatters = False

    def __init__(self, *, host: str) -> None:
        self._host = host
        self._agent: NixlAgent | None = NixlAgent(host=host)
        self._connections: dict[str, _Connection] = {}
        self._wakeup = Wakeup()
        self._woken = False
        self._poll_interval_s = TICK_S

    def receives(self, kind: str) -> bool:
        """See `TransportClient.receives`."""
        return kind in ("cpu", "cuda")

    def connect(self, source: str, offer: RankOffer) -> None:
        """See `TransportClient.connect`."""
        self._connections[source] = _Connection(
            NonBlockingChannel.dial(split_address(offer.address), max(ANSWER_BYTES, LOCATION_BYTES))
        )

    def ask(self, source: str, request: Request, target: ReadTarget, proof: TicketProof | None = None) -> None:
        """See `TransportClient.ask`."""
        connection = self._connections[source]
        connection.sent[request.number] = _SentRequest(request, target)
        with contextlib.suppress(OSError):  # `poll` runs into it again, and reports it
            connection.channel.send(REQUEST, encode_message(request))

    def poll(self, wait_s: float) -> list[Event]:
        """See `TransportClient.poll`."""
        assert self._agent is not None
        end = time.monotonic() + wait_s
        self._agent.progress()
        events = self._events()
        while not events and not self._woken and (left_s := end - time.monotonic()) > 0:
            self._wait(left_s)
            events = self._events()
        self._woken = False
        return events

    def wake(self) -> None:
        """See `TransportClient.wake`."""
        self._wakeup.set()

    def lanes(self, source: str) -> tuple[str, ...]:
        """See `TransportClient.lanes`. NIXL does not expose the lanes of its UCX."""
        return ("nixl/UCX",)

    def hang_up(self, source: str) -> None:
        """See `TransportClient.hang_up`: it has no threads."""

    def drop(self, source: str) -> None:
        """See `TransportClient.drop`."""
        connection = self._connections.pop(source, None)
        if connection is None or self._agent is None:
            return
        connection.channel.close()
        reads = [item.read for item in connection.sent.values() if item.read is not None]
        ended = self._drain(reads)
        for read in reads:
            read.release()
        if not ended:
            self._renew()

    def close(self) -> None:
        """See `TransportClient.close`."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        for connection in self._connections.values():
            connection.channel.close()
            for item in connection.sent.values():
                if item.read is not None:
                    item.read.release()
        self._connections = {}
        agent.close()  # ends the reads under way
        self._wakeup.close()

    def _wait(self, wait_s: float) -> None:
        """Wait for sources and `wake`; only for the poll interval while reads are under way."""
        poller = select.poll()
        poller.register(self._wakeup, select.POLLIN)
        for connection in self._connections.values():
            if not connection.broken:
                poller.register(connection.channel, connection.channel.events)
        sent = (item for connection in self._connections.values() for item in connection.sent.values())
        if any(item.read is not None for item in sent):
            time.sleep(min(wait_s, self._poll_interval_s))
            self._poll_interval_s = min(2 * self._poll_interval_s, LONGEST_TICK_S)
            wait_s = 0.0
        poller.poll(wait_s * 1000)
        self._woken |= self._wakeup.clear()

    def _events(self) -> list[Event]:
        events: list[Event] = []
        for source, connection in self._connections.items():
            if connection.broken:
                continue
            try:
                events += [AnswerReceived(source, answer, placed) for answer, placed in self._advance(connection)]
            except (WeightsError, OSError) as error:
                connection.broken = True
                events.append(ConnectionLost(source, f"{type(error).__name__}: {error}"))
        return events

    def _advance(self, connection: _Connection) -> list[tuple[SourceAnswer, bool]]:
        """Return the answers that are complete, and whether their requests have filled memory of a device.

        Raises WeightsError and OSError when the connection broke.
        """
        if connection.fault:
            raise WeightsError(connection.fault)
        connection.channel.flush()
        for kind, body in connection.channel.receive():
            self._handle(connection, kind, body)
        done = [(notice, False) for notice in connection.waiting.values()]
        connection.waiting = {}
        for number, item in list(connection.sent.items()):
            if item.read is not None and item.read.done():
                item.read.release()
                item.read = None
                self._poll_interval_s = TICK_S
                connection.channel.send(FETCHED, NUMBER.pack(number))
            if item.answer is not None and item.read is None:
                del connection.sent[number]
                done.append((item.answer, bool(item.target.tensors)))
        return done

    def _handle(self, connection: _Connection, kind: int, body: bytes) -> None:
        """Handle a message from a source."""
        if kind == ANSWER:
            answer = decode_answer(body)
            item = connection.sent.get(answer.number)
            if item is None or item.answer is not None:
                raise WeightsError("the source answered another request")
            if answer.waiting:
                connection.waiting[answer.number] = answer
                return
            if isinstance(item.request, ReadBoxes) and item.blocks is None and not answer.reason:
                raise WeightsError("the source did not send the location of its payload")
            item.answer = answer
        elif kind == LOCATION:
            self._fetch(connection, decode_checked(_locations, body, "The source sent a malformed location"))
        else:
            raise WeightsError(f"the source sent {len(body)} bytes of kind {kind}")

    def _fetch(self, connection: _Connection, location: PayloadLocation) -> None:
        """Begin to read what the source has granted."""
        assert self._agent is not None
        item = connection.sent.get(location.number)
        if item is None or not isinstance(item.request, ReadBoxes) or item.blocks is not None:
            raise WeightsError("the source sent the location of a payload that was not requested")
        buffers = item.target.buffers
        if [size for _, size in location.segments] != [buffer.nbytes for buffer in buffers]:
            raise WeightsError("the source grants payloads of another size than was requested")
        if location.metadata:
            connection.metadata = location.metadata
            connection.agent = self._agent.add_remote(location.metadata)
        devices = location.devices or (HOST,) * len(buffers)
        if len(devices) != len(buffers):
            raise WeightsError(f"the source names {len(devices)} devices of {len(buffers)} segments")
        places = zip(buffers, location.segments, devices, strict=True)
        item.blocks = tuple(RemoteBlock(buffer, address, device) for buffer, (address, size), device in places if size)
        if item.blocks:
            item.read = self._agent.read(connection.agent, item.blocks)
            self._poll_interval_s = TICK_S
        else:
            connection.channel.send(FETCHED, NUMBER.pack(location.number))

    def _drain(self, reads: Sequence[NixlRead]) -> bool:
        """Wait for reads to end, for at most `DRAIN_S`; return whether all have ended without an error."""
        end = time.monotonic() + DRAIN_S
        left = list(reads)
        while True:
            try:
                left = [read for read in left if not read.done()]
            except WeightsError:
                return False  # one has failed; the state of its parts is unknown
            if not left or time.monotonic() > end:
                return not left
            time.sleep(TICK_S)

    def _renew(self) -> None:
        """Replace the agent, which ends all of its reads, and restart the reads from other sources."""
        assert self._agent is not None
        restarted = [
            (connection, item)
            for connection in self._connections.values()
            for item in connection.sent.values()
            if item.read is not None
        ]
        for _, item in restarted:
            assert item.read is not None
            item.read.release()
            item.read = None
        self._agent.close()
        self._agent = NixlAgent(host=self._host)
        for connection in self._connections.values():
            try:
                if connection.metadata:
                    connection.agent = self._agent.add_remote(connection.metadata)
                for item in [item for other, item in restarted if other is connection]:
                    assert item.blocks is not None
                    item.read = self._agent.read(connection.agent, item.blocks)
            except WeightsError as error:
                connection.fault = str(error)
