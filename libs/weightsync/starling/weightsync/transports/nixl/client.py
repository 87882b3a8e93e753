"""NIXL: one-sided reads, for networks with RDMA; its wheels bring a UCX that has InfiniBand and EFA.

Requests and answers go over a socket. A source that grants a `ReadBoxes` says where its segments lie, contiguous
boxes in
the snapshot itself and the others packed, and the reader fetches them without the source's help, straight to where they
belong. Then it says so, and the source uses the packing memory again. What a source registers is its snapshots and its
packing memory, never its other memory. It tells nobody how to read it before a token was presented and granted.

The reader reads, and not the source writes, because only so the reader decides what happens to its memory: a source
that was stopped, and is dropped for it, cannot write later what nobody wants any more. The price: the key that comes
with the first read that is granted opens all snapshots of that source for as long as it serves, whatever their tokens.
Over TCP UCX asks for no key at all. Readers and sources must trust each other.
"""

from __future__ import annotations

import contextlib
import select
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from starling.common.errors import WeightsError
from starling.common.wakeup import Wakeup
from starling.weightsync.memory.arrays import Memory
from starling.weightsync.plan.offer import RankOffer
from starling.weightsync.transports.base import AnswerReceived, ConnectionLost, Event, ReadTarget
from starling.weightsync.transports.messages import (
    ANSWER_BYTES,
    Number,
    ReadBoxes,
    Request,
    SourceAnswer,
    decode_answer,
    decode_checked,
    encode_message,
)
from starling.weightsync.transports.nixl.agent import LONGEST_TICK_S, TICK_S, NixlAgent, NixlRead
from starling.weightsync.transports.sockets.channel import split_address
from starling.weightsync.transports.sockets.nonblocking import NonBlockingChannel

DRAIN_S: Final = 0.25
"""Reads that are not wanted any more may take so long to end before their agent is ended."""
PLACE_BYTES: Final = 1 << 20
"""Longest `PayloadLocation`."""
REQUEST, TAKEN, ANSWER, PLACE = range(1, 5)
"""Kinds of messages. The reader's: a request, and the number of one that it has taken. The source's: the others."""
NUMBER: Final = struct.Struct("<Q")
"""What a message of the kind `TAKEN` is."""


class PayloadLocation(msgspec.Struct, frozen=True, kw_only=True):
    """Where a source has put what it was asked for."""

    number: Number
    """The request's."""
    metadata: bytes = b""
    """How to read its memory, when that is new to this reader."""
    segments: tuple[tuple[Number, Number], ...] = ()
    """Address and bytes of each segment of a `ReadBoxes`."""


_places: Final = msgspec.msgpack.Decoder(PayloadLocation)


@dataclass
class _Ticket:
    """A request of the destination under way."""

    request: Request
    landing: ReadTarget
    blocks: tuple[tuple[Memory, int], ...] | None = None
    """Where each segment goes and at which address it lies, once the source has told."""
    reading: NixlRead | None = None
    answer: SourceAnswer | None = None


@dataclass
class _Peer:
    """One source at the destination."""

    line: NonBlockingChannel
    agent: str = ""
    """Its name, once it has told how its memory is read."""
    metadata: bytes = b""
    tickets: dict[int, _Ticket] = field(default_factory=dict)
    fault: str = ""
    """Why it cannot be read any more, when that was not met in its turn."""
    broken: bool = False
    """Whether its loss was reported."""


class NixlClient:
    """A `Wire` over NIXL: one agent for all sources, which is replaced when a source does not let go of it."""

    scatters = False

    def __init__(self, *, loopback: bool) -> None:
        self._loopback = loopback
        self._agent: NixlAgent | None = NixlAgent(loopback=loopback)
        self._peers: dict[str, _Peer] = {}
        self._wakeup = Wakeup()
        self._woken = False
        self._tick_s = TICK_S

    def connect(self, source: str, offer: RankOffer) -> None:
        """See `Wire.connect`."""
        self._peers[source] = _Peer(
            NonBlockingChannel.dial(split_address(offer.address), max(ANSWER_BYTES, PLACE_BYTES))
        )

    def ask(self, source: str, request: Request, landing: ReadTarget) -> None:
        """See `Wire.ask`."""
        peer = self._peers[source]
        peer.tickets[request.number] = _Ticket(request, landing)
        with contextlib.suppress(OSError):  # `poll` meets it again, and reports it
            peer.line.send(REQUEST, encode_message(request))

    def poll(self, wait_s: float) -> list[Event]:
        """See `Wire.poll`."""
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
        """See `Wire.wake`."""
        self._wakeup.set()

    def lanes(self, source: str) -> tuple[str, ...]:
        """See `Wire.lanes`. NIXL does not tell which lanes its UCX takes."""
        return ("nixl/UCX",)

    def drop(self, source: str) -> None:
        """See `Wire.drop`."""
        peer = self._peers.pop(source, None)
        if peer is None or self._agent is None:
            return
        peer.line.close()
        under_way = [ticket.reading for ticket in peer.tickets.values() if ticket.reading is not None]
        ended = self._drain(under_way)
        for reading in under_way:
            reading.release()
        if not ended:
            self._renew()

    def close(self) -> None:
        """See `Wire.close`."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        for peer in self._peers.values():
            peer.line.close()
            for ticket in peer.tickets.values():
                if ticket.reading is not None:
                    ticket.reading.release()
        self._peers = {}
        agent.close()  # ends reads that were under way
        self._wakeup.close()

    def _wait(self, wait_s: float) -> None:
        """Wait for sources and `wake`; where reads are under way, not for long."""
        poller = select.poll()
        poller.register(self._wakeup, select.POLLIN)
        for peer in self._peers.values():
            if not peer.broken:
                poller.register(peer.line, peer.line.events)
        if any(ticket.reading is not None for peer in self._peers.values() for ticket in peer.tickets.values()):
            time.sleep(min(wait_s, self._tick_s))
            self._tick_s = min(2 * self._tick_s, LONGEST_TICK_S)
            wait_s = 0.0
        poller.poll(wait_s * 1000)
        self._woken |= self._wakeup.clear()

    def _events(self) -> list[Event]:
        events: list[Event] = []
        for source, peer in self._peers.items():
            if peer.broken:
                continue
            try:
                events += [AnswerReceived(source, answer) for answer in self._advance(peer)]
            except (WeightsError, OSError) as error:
                peer.broken = True
                events.append(ConnectionLost(source, f"{type(error).__name__}: {error}"))
        return events

    def _advance(self, peer: _Peer) -> list[SourceAnswer]:
        """Return the answers that are complete. Raises WeightsError and OSError when the connection broke."""
        if peer.fault:
            raise WeightsError(peer.fault)
        peer.line.flush()
        for kind, body in peer.line.receive():
            self._hear(peer, kind, body)
        done: list[SourceAnswer] = []
        for number, ticket in list(peer.tickets.items()):
            if ticket.reading is not None and ticket.reading.done():
                ticket.reading.release()
                ticket.reading = None
                self._tick_s = TICK_S
                peer.line.send(TAKEN, NUMBER.pack(number))
            if ticket.answer is not None and ticket.reading is None:
                del peer.tickets[number]
                done.append(ticket.answer)
        return done

    def _hear(self, peer: _Peer, kind: int, body: bytes) -> None:
        """Act on a message of a source."""
        if kind == ANSWER:
            answer = decode_answer(body)
            ticket = peer.tickets.get(answer.number)
            if ticket is None or ticket.answer is not None:
                raise WeightsError("the source answered another question")
            if isinstance(ticket.request, ReadBoxes) and ticket.blocks is None and not answer.reason:
                raise WeightsError("the source did not say where its answer lies")
            ticket.answer = answer
        elif kind == PLACE:
            self._fetch(peer, decode_checked(_places, body, "The source sent a malformed place"))
        else:
            raise WeightsError(f"the source sent {len(body)} bytes of kind {kind}")

    def _fetch(self, peer: _Peer, place: PayloadLocation) -> None:
        """Begin to read what the source has granted."""
        assert self._agent is not None
        ticket = peer.tickets.get(place.number)
        if ticket is None or not isinstance(ticket.request, ReadBoxes) or ticket.blocks is not None:
            raise WeightsError("the source said where lies what it was not asked for")
        buffers = ticket.landing.buffers
        if [size for _, size in place.segments] != [buffer.nbytes for buffer in buffers]:
            raise WeightsError("the source grants payloads of another size than their places have")
        if place.metadata:
            peer.metadata = place.metadata
            peer.agent = self._agent.learn(place.metadata)
        pairs = zip(buffers, place.segments, strict=True)
        ticket.blocks = tuple((buffer, address) for buffer, (address, size) in pairs if size)
        if ticket.blocks:
            ticket.reading = self._agent.read(peer.agent, ticket.blocks)
            self._tick_s = TICK_S
        else:
            peer.line.send(TAKEN, NUMBER.pack(place.number))

    def _drain(self, under_way: Sequence[NixlRead]) -> bool:
        """Wait for reads to end, for at most `DRAIN_S`; return whether they have, all of them and well."""
        end = time.monotonic() + DRAIN_S
        left = list(under_way)
        while True:
            try:
                left = [reading for reading in left if not reading.done()]
            except WeightsError:
                return False  # a part of it has failed; what the others do is not known
            if not left or time.monotonic() > end:
                return not left
            time.sleep(TICK_S)

    def _renew(self) -> None:
        """End the agent, so that nothing that it reads arrives any more, and begin the reads of others again."""
        assert self._agent is not None
        again = [
            (peer, ticket)
            for peer in self._peers.values()
            for ticket in peer.tickets.values()
            if ticket.reading is not None
        ]
        for _, ticket in again:
            assert ticket.reading is not None
            ticket.reading.release()
            ticket.reading = None
        self._agent.close()
        self._agent = NixlAgent(loopback=self._loopback)
        for peer in self._peers.values():
            try:
                if peer.metadata:
                    peer.agent = self._agent.learn(peer.metadata)
                for ticket in [ticket for other, ticket in again if other is peer]:
                    assert ticket.blocks is not None
                    ticket.reading = self._agent.read(peer.agent, ticket.blocks)
            except WeightsError as error:
                peer.fault = str(error)
