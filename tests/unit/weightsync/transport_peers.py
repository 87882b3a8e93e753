"""Sources without torch, in this process or a child process, and a reader that speaks to them request by request."""

from __future__ import annotations

import multiprocessing as mp
import os
import platform
import secrets
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Literal

import msgspec
import numpy as np
import pytest

from starling.weightsync.memory.arena import Arena
from starling.weightsync.memory.arrays import Array, packed_arrays
from starling.weightsync.memory.digests import DigestMode
from starling.weightsync.offers.offer import RankOffer, Transport
from starling.weightsync.offers.tickets import TicketProof, prove
from starling.weightsync.plan.layout import ITEM_BYTES, Box, ShardPiece
from starling.weightsync.transports.base import AnswerReceived, Event, ReadTarget, TransportClient
from starling.weightsync.transports.local import LocalClient
from starling.weightsync.transports.messages import OpenSnapshot, ReadBoxes, ReleaseSnapshot, Request, SourceAnswer
from starling.weightsync.transports.nixl.agent import has_nixl
from starling.weightsync.transports.nixl.client import NixlClient
from starling.weightsync.transports.registry import serve
from starling.weightsync.transports.source import SnapshotSource
from starling.weightsync.transports.tcp import tcp_client
from starling.weightsync.transports.ucx.client import UcxClient
from starling.weightsync.transports.ucx.worker import has_ucx

ANSWER_S = 20.0


NIXL_IS_EXPECTED = sys.platform == "linux" and platform.machine() == "x86_64"
"""Whether the development installation has NIXL: there its tests fail without it, rather than being skipped."""
needs_nixl = pytest.mark.skipif(not (NIXL_IS_EXPECTED or has_nixl()), reason="NIXL is not installed")


def served_transports() -> tuple[Transport, ...]:
    """Return the transports with a server that can be used here."""
    ucx: tuple[Transport, ...] = ("ucx",) if has_ucx() else ()
    nixl: tuple[Transport, ...] = ("nixl",) if NIXL_IS_EXPECTED or has_nixl() else ()
    return ("tcp", "gloo", *ucx, *nixl)


NO_TARGET = ReadTarget()


def box(*spans: tuple[int, int]) -> Box:
    """Return a box from begin and end of each dim."""
    return Box(offset=tuple(a for a, _ in spans), size=tuple(b - a for a, b in spans))


def piece(name: str, dtype: str, *spans: tuple[int, int]) -> ShardPiece:
    """Return a piece, or a box to request."""
    return ShardPiece(names=(name,), dtype=dtype, box=box(*spans))


def content(wanted: ShardPiece, shape: Sequence[int]) -> Array:
    """Return the content of a box of a tensor of that shape: different bits for each name and position."""
    num = int(np.prod(shape))
    draw = np.random.default_rng(sum(wanted.names[0].encode()))
    whole = draw.integers(0, 256, num * ITEM_BYTES[wanted.dtype], np.uint8).view(f"u{ITEM_BYTES[wanted.dtype]}")
    return whole.reshape(shape)[tuple(slice(a, a + n) for a, n in zip(wanted.box.offset, wanted.box.size, strict=True))]


AnyTransport = Transport | Literal["tcp+aes"]
"""A transport to be tested; ``tcp+aes`` is encrypted ``tcp``."""


def unencrypted(transport: AnyTransport) -> tuple[Transport, bool]:
    """Return the transport of a source, and whether it encrypts."""
    return ("tcp", True) if transport == "tcp+aes" else (transport, False)


class ServedSource:
    """A served arena with one snapshot of whole tensors."""

    def __init__(self, transport: AnyTransport, pieces: Sequence[ShardPiece]) -> None:
        self.pieces = tuple(pieces)
        self.arena = Arena(self.pieces)
        self.source = SnapshotSource(self.arena, self.pieces)
        kind, encrypted = unencrypted(transport)
        self.serving = serve(self.source, kind, "127.0.0.1", encrypted=encrypted)
        assert self.serving.transport == kind
        self.server, self.address = self.serving.server, self.serving.server.address
        self.offer = self.publish()

    def publish(self) -> RankOffer:
        """Put the same content into the next snapshot."""
        slot = self.arena.claim(0.0)
        for piece, array in zip(self.pieces, packed_arrays(self.pieces, self.arena.slots[slot]), strict=True):
            np.copyto(array, content(piece, piece.box.size))
        snapshot, secret = self.arena.commit(slot)
        return self.serving.offer(rank=0, snapshot=snapshot, secret=secret, holds="", root="")

    def close(self) -> None:
        self.server.close(ANSWER_S)
        self.arena.close()


@contextmanager
def serving(transport: AnyTransport, pieces: Sequence[ShardPiece]) -> Iterator[ServedSource]:
    """Serve a source in this process."""
    made = ServedSource(transport, pieces)
    try:
        yield made
    finally:
        made.close()


def _serve(transport: AnyTransport, pieces: bytes, pipe: Connection) -> None:
    with serving(transport, msgspec.msgpack.decode(pieces, type=tuple[ShardPiece, ...])) as made:
        pipe.send_bytes(msgspec.msgpack.encode(made.offer))
        while pipe.recv():
            pipe.send_bytes(msgspec.msgpack.encode(made.publish()))


class RemoteSource:
    """A source in a child process."""

    def __init__(self, transport: AnyTransport, pieces: Sequence[ShardPiece]) -> None:
        context = mp.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        arguments = (transport, msgspec.msgpack.encode(tuple(pieces)), theirs)
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.offer = self._answer()

    def publish(self) -> RankOffer:
        self._pipe.send(True)
        return self._answer()

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.join(ANSWER_S)

    def _answer(self) -> RankOffer:
        assert self._pipe.poll(ANSWER_S), "the source does not answer"
        return msgspec.msgpack.decode(self._pipe.recv_bytes(), type=RankOffer)


@contextmanager
def remote_source(transport: AnyTransport, pieces: Sequence[ShardPiece]) -> Iterator[RemoteSource]:
    """Run a source in a child process, which is killed afterwards."""
    made = RemoteSource(transport, pieces)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.join(ANSWER_S)


def opening(offer: RankOffer, number: int = 1) -> OpenSnapshot:
    """Return a request to open the offered snapshot, with a ticket that was not used before."""
    proof = prove(offer, rank=0, nonce=secrets.token_hex(8))
    return OpenSnapshot(number=number, snapshot=offer.snapshot, proof=proof.text)


def local_offer(snapshot: int, secret: str) -> RankOffer:
    """Return the offer of a snapshot of an arena in this process."""
    return RankOffer(rank=0, transport="local", address="", secret=secret, snapshot=snapshot, holds="", root="")


def proof_for(offer: RankOffer) -> str:
    """Return the text of a proof with which the offered snapshot can be opened once."""
    return opening(offer).proof


class Reader:
    """A transport client, and requests to one source over it."""

    def __init__(self, transport: AnyTransport, host: str = "127.0.0.1") -> None:
        self.pool = ThreadPoolExecutor(2)
        self.client: TransportClient
        match transport:
            case "local":
                self.client = LocalClient(self.pool)
            case "tcp" | "tcp+aes":
                self.client = tcp_client()
            case "ucx":
                self.client = UcxClient(host=host)
            case "gloo" | "nccl":
                from starling.weightsync.transports.collective import collective_client  # imports torch

                self.client = collective_client(transport)
            case "nixl":
                self.client = NixlClient(host=host)
        self._number = 1
        self._events: deque[Event] = deque()

    def connect(self, offer: RankOffer, name: str = "source") -> SourceAnswer:
        """Connect and open the snapshot."""
        self.client.connect(name, offer)
        return self.open(offer, name)

    def open(self, offer: RankOffer, name: str = "source") -> SourceAnswer:
        """Open the snapshot."""
        request, proof = self.opening(offer)
        return self.ask(request, name=name, proof=proof)

    def opening(self, offer: RankOffer, rank: int = 0) -> tuple[OpenSnapshot, TicketProof]:
        """Return a request that opens the offered snapshot, and the proof in it."""
        proof = prove(offer, rank=rank, nonce=secrets.token_hex(8))
        return OpenSnapshot(number=self.number(), snapshot=offer.snapshot, proof=proof.text), proof

    def number(self, num: int = 1) -> int:
        first, self._number = self._number, self._number + num
        return first

    def request(
        self, boxes: Sequence[ShardPiece], segments: Sequence[int] = (), digests: DigestMode = "full"
    ) -> ReadBoxes:
        """Return a request for boxes, by default with a segment for each."""
        counts = tuple(segments) or (1,) * len(boxes)
        number = self.number(len(counts))
        return ReadBoxes(number=number, tag=number, segments=counts, boxes=tuple(boxes), digests=digests, salt=0)

    def ask(
        self,
        request: Request,
        target: ReadTarget = NO_TARGET,
        name: str = "source",
        proof: TicketProof | None = None,
    ) -> SourceAnswer:
        """Send a request and wait for the answer."""
        self.client.ask(name, request, target, proof)
        event = self.event()
        assert isinstance(event, AnswerReceived), event
        assert event.answer.number == request.number
        return event.answer

    def read(self, boxes: Sequence[ShardPiece]) -> tuple[SourceAnswer, list[Array]]:
        """Read boxes into fresh arrays, filled with ones."""
        arrays = [np.full(b.box.size, 0xFF, f"u{ITEM_BYTES[b.dtype]}") for b in boxes]
        return self.ask(self.request(boxes), read_target(arrays)), arrays

    def release(self) -> SourceAnswer:
        return self.ask(ReleaseSnapshot(number=self.number()))

    def event(self, wait_s: float = ANSWER_S) -> Event | None:
        """Return the next event, or None when there is none."""
        end = time.monotonic() + wait_s
        while not self._events and time.monotonic() < end:
            self._events += self.client.poll(0.02)
        return self._events.popleft() if self._events else None

    def close(self) -> None:
        self.client.close()
        self.pool.shutdown()


def read_target(arrays: Sequence[Array]) -> ReadTarget:
    """Return a target that receives each box in place."""
    return ReadTarget(tuple(arrays), tuple(array.reshape(-1).view(np.uint8) for array in arrays))


@contextmanager
def reader(transport: AnyTransport, host: str = "127.0.0.1") -> Iterator[Reader]:
    """Open a reader of sources at `host`, which is closed afterwards."""
    made = Reader(transport, host)
    try:
        yield made
    finally:
        made.close()
