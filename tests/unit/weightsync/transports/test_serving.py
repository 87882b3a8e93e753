"""Untrusted input to a source and to a reader: it ends at most the connection."""

from __future__ import annotations

import gc
import mmap
import os
import random
import resource
import select
import socket
import struct
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress

import msgspec
import numpy as np
import pytest
from transport_peers import (
    ANSWER_S,
    NO_TARGET,
    Reader,
    ServedSource,
    content,
    needs_nixl,
    piece,
    read_target,
    reader,
    served_transports,
    serving,
)

from starling.common.errors import WeightsError
from starling.weightsync.memory.arrays import Memory
from starling.weightsync.offers.offer import RankOffer, Transport, make_offer
from starling.weightsync.offers.tickets import BOX_COST_BYTES, SPENT, offer_for, prove, reading_cost, ticket
from starling.weightsync.plan.layout import MAX_NAMES, Box, ShardPiece
from starling.weightsync.plan.moves import MAX_TRANSFERS
from starling.weightsync.puller.sources import SourceConnections
from starling.weightsync.transports.base import AnswerReceived, ConnectionLost, ReadTarget
from starling.weightsync.transports.endpoints import (
    IDLE_TIMEOUT_S,
    MAX_CONNECTIONS,
    MAX_SHARE,
    MAX_WAITING,
    most_connections,
    split_address,
    surplus,
)
from starling.weightsync.transports.messages import (
    LENGTH,
    REQUEST_BYTES,
    OpenSnapshot,
    ReadBoxes,
    SourceAnswer,
    decode_answer,
    decode_request,
    encode_message,
    refusal,
    with_checksum,
    with_length,
)
from starling.weightsync.transports.sockets.channel import Channel
from starling.weightsync.transports.sockets.client import SocketClient
from starling.weightsync.transports.sockets.connections import ReaderConnections
from starling.weightsync.transports.sockets.listener import Listener
from starling.weightsync.transports.source import MAX_LATE, MAX_REFUSED, PendingBoxes
from starling.weightsync.transports.ucx.protocol import REQUEST
from starling.weightsync.transports.ucx.worker import has_ucx

PIECE = piece("a", "uint8", (0, 1000))


@pytest.fixture(scope="module")
def served() -> Iterator[ServedSource]:
    with serving("tcp", [PIECE]) as made:
        yield made


def works(made: ServedSource) -> bool:
    with reader(made.serving.transport) as peer:
        answer = peer.connect(made.offer)
        _, arrays = peer.read([PIECE])
        return not answer.reason and arrays[0].tobytes() == content(PIECE, (1000,)).tobytes()


def read_of(**changes: object) -> bytes:
    whole = ReadBoxes(number=1, tag=1, segments=(1,), boxes=(PIECE,), digests="full", salt=0)
    return with_checksum(msgspec.msgpack.encode(msgspec.structs.replace(whole, **changes)))


def box_of(offset: tuple[int, ...], size: tuple[int, ...]) -> ShardPiece:
    return ShardPiece(names=("a",), dtype="uint8", box=Box(offset=offset, size=size))


DEEP = msgspec.Raw(b"\x91" * 15_000 + b"\xc0")
"""An unknown field of as many levels."""


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "malformed request"),
        (b"\xc1" * 40, "malformed request"),
        (with_checksum(msgspec.msgpack.encode({"type": "shutdown"})), "malformed request"),
        (with_checksum(b"\x81\xa4type\xa4\xff\xfe\xfd\xfc"), "malformed request"),
        (with_checksum(msgspec.msgpack.encode({"type": "release", "number": 1, "new": DEEP})), "malformed request"),
        (read_of(number=-1), "malformed request"),
        (read_of(tag=1 << 63), "malformed request"),
        (read_of(digests="md5"), "malformed request"),
        (read_of(segments=()), "do not have 1 boxes"),
        (read_of(segments=(0,)), "do not have 1 boxes"),
        (read_of(segments=(2,)), r"segments \(2,\) do not have 1 boxes"),
        (read_of(boxes=(), segments=()), "Refused to read 0 boxes"),
        (read_of(boxes=(PIECE,) * (MAX_TRANSFERS + 1), segments=(MAX_TRANSFERS + 1,)), "may be requested"),
        (read_of(boxes=(piece("a", "uint8", (0, 1 << 31)),)), "Refused to read 2147483648 bytes at once"),
        (read_of(boxes=(piece("a", "uint8", (-1, 3)),)), "malformed box"),
        (read_of(boxes=(piece("a", "object", (0, 3)),)), "malformed box"),
        (read_of(boxes=(ShardPiece(names=(), dtype="uint8", box=PIECE.box),)), "malformed box"),
        (read_of(boxes=(ShardPiece(names=("a",) * (MAX_NAMES + 1), dtype="uint8", box=PIECE.box),)), "malformed box"),
        (read_of(boxes=(ShardPiece(names=("a" * BOX_COST_BYTES,), dtype="uint8", box=PIECE.box),)), "bytes for 1 box"),
        (read_of(boxes=(box_of((0,), (1, 1)),)), "malformed box"),
        (read_of(boxes=(box_of((0,) * 2000, ((1 << 63) - 1,) * 2000),)), "malformed box"),
        (read_of(boxes=(box_of((0,), (1 << 62,)),)), "malformed box"),
    ],
)
def test_malformed_request_is_refused_with_the_reason(data: bytes, sentence: str) -> None:
    with pytest.raises(WeightsError, match=sentence):
        decode_request(data)


def test_any_flipped_bit_of_a_message_is_detected() -> None:
    """A flipped bit in a request would fetch another box, with correct digests of that box."""
    for message, decode in (
        (read_of(), decode_request),
        (encode_message(SourceAnswer(number=7, digests=b"d" * 16)), decode_answer),
    ):
        decode(message)
        for position in range(len(message)):
            for bit in range(8):
                flipped = bytearray(message)
                flipped[position] ^= 1 << bit
                with pytest.raises(WeightsError, match="its checksum is wrong"):
                    decode(flipped)


def test_deeply_nested_answer_is_refused() -> None:
    with pytest.raises(WeightsError, match="malformed answer"):
        decode_answer(with_checksum(msgspec.msgpack.encode({"number": 1, "new": DEEP})))


@pytest.mark.parametrize("address", ["a:" + "9" * 5000, "a" * 64 + ".com:80", "é" * 100 + ":80", ":80", "a:0", "a"])
def test_malformed_address_of_a_source_is_refused(address: str) -> None:
    with pytest.raises(WeightsError, match="is not an address of the form host:port"):
        split_address(address)
    offer = RankOffer(rank=0, transport="tcp", address=address, snapshot=1, holds="", root="")
    with reader("tcp") as peer, pytest.raises(WeightsError, match="is not an address"):
        peer.client.connect("source", offer)


def test_too_long_message_is_refused_by_its_sender() -> None:
    names = tuple("n" * 4096 for _ in range(300))
    boxes = (ShardPiece(names=names, dtype="uint8", box=PIECE.box),)
    with pytest.raises(WeightsError, match=r"exceeds .* use smaller buckets"):
        encode_message(ReadBoxes(number=1, tag=1, segments=(1,), boxes=boxes, digests="off", salt=0))
    assert len(encode_message(refusal(1, "x" * 10_000))) < 2000
    assert decode_answer(encode_message(refusal(7, "no"))) == SourceAnswer(number=7, reason="no")


def connect(made: ServedSource) -> socket.socket:
    host, _, port = made.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


@pytest.mark.parametrize(
    "data",
    [
        os.urandom(4096),
        LENGTH.pack(1 << 31),
        LENGTH.pack(REQUEST_BYTES + 1) + b"x" * 100,
        LENGTH.pack(10) + b"\xc1" * 10,
        with_length(OpenSnapshot(number=1, snapshot=3, proof="x"))[:-3],
    ],
)
def test_tcp_server_survives_garbage(served: ServedSource, data: bytes) -> None:
    with connect(served) as plain:
        plain.sendall(data)
    assert works(served)


def test_server_times_out_without_a_token_despite_requests(served: ServedSource) -> None:
    with connect(served) as plain:
        for number in range(1, MAX_REFUSED):
            plain.sendall(with_length(OpenSnapshot(number=number, snapshot=served.offer.snapshot, proof="0" * 32)))
            (length,) = LENGTH.unpack(plain.recv(LENGTH.size, socket.MSG_WAITALL))
            assert "wrong" in decode_answer(plain.recv(length, socket.MSG_WAITALL)).reason
    assert works(served)


@pytest.mark.parametrize("transport", [transport for transport in served_transports() if transport != "gloo"])
def test_stranger_is_disconnected_however_many_requests_it_sends(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "sockets" if transport == "tcp" else transport
    monkeypatch.setattr(f"starling.weightsync.transports.{module}.server.IDLE_TIMEOUT_S", 0.2)
    with serving(transport, [PIECE]) as made, reader(transport) as peer:
        forged = msgspec.structs.replace(made.offer, secret="0" * 32)
        peer.client.connect("source", forged)
        end, lost = time.monotonic() + ANSWER_S, False
        while not lost and time.monotonic() < end:
            request, proof = peer.opening(forged)
            peer.client.ask("source", request, NO_TARGET, proof)
            lost = isinstance(peer.event(), ConnectionLost)
        assert lost


@pytest.mark.parametrize("transport", [transport for transport in served_transports() if transport != "gloo"])
def test_reader_without_a_lease_is_refused_a_few_times_on_a_connection(transport: Transport) -> None:
    """Many that ask without a pause would take the processor time of a policy."""
    with serving(transport, [PIECE]) as made, reader(transport) as peer, reader(transport) as late:
        forged = msgspec.structs.replace(made.offer, secret="0" * 32)
        assert "wrong" in peer.connect(forged).reason
        for _ in range(MAX_REFUSED - 1):
            assert "wrong" in peer.open(forged).reason
        peer.client.ask("source", peer.opening(forged)[0], NO_TARGET)
        assert isinstance(peer.event(), ConnectionLost)

        assert not late.connect(made.offer).reason
        made.source.arena.revoke_all()
        for _ in range(MAX_REFUSED):
            assert "revoked" in late.read([PIECE])[0].reason
        late.client.ask("source", late.request([PIECE]), read_target([np.zeros(1000, np.uint8)]))
        assert isinstance(late.event(), ConnectionLost)


@pytest.mark.parametrize("transport", [transport for transport in served_transports() if transport != "gloo"])
def test_stranger_announces_no_long_request(transport: Transport) -> None:
    """It would be kept until it is complete, on a thousand connections."""
    size = (64 if transport == "ucx" else 16) * 1024 + 1
    with serving(transport, [PIECE]) as made, ExitStack() as connections:
        plain = stranger(made, connections)
        plain.sendall(LENGTH.pack(size) + b"\x01" + bytes(100))
        plain.settimeout(IDLE_TIMEOUT_S / 2)
        with suppress(ConnectionError):
            assert not plain.recv(1)


@contextmanager
def impostor(reply: Callable[[socket.socket], None]) -> Iterator[RankOffer]:
    """Listen, answer one connection by `reply`, and close."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            connection, _ = listener.accept()
            with connection:
                reply(connection)

        thread = threading.Thread(target=run)
        thread.start()
        yield RankOffer(
            rank=0,
            transport="tcp",
            address=f"127.0.0.1:{listener.getsockname()[1]}",
            snapshot=1,
            holds="",
            root="",
        )
        thread.join(20)


def take(connection: socket.socket) -> int:
    """Receive a request; return its number."""
    (length,) = LENGTH.unpack(connection.recv(LENGTH.size, socket.MSG_WAITALL))
    return decode_request(connection.recv(length, socket.MSG_WAITALL)).number


def cut_short(connection: socket.socket) -> None:
    for _ in range(2):
        connection.sendall(with_length(SourceAnswer(number=take(connection), digests=b"d" * 16)))
    connection.sendall(b"x" * 500)


def says_nothing(connection: socket.socket) -> None:
    take(connection)


def says_garbage(connection: socket.socket) -> None:
    take(connection)
    connection.sendall(struct.pack("<I", 5) + b"\xc1" * 5)


def says_too_much(connection: socket.socket) -> None:
    take(connection)
    connection.sendall(struct.pack("<I", 1 << 30))


def answers_something_else(connection: socket.socket) -> None:
    connection.sendall(with_length(SourceAnswer(number=take(connection) + 1)))


@pytest.mark.parametrize("reply", [cut_short, says_nothing, says_garbage, says_too_much, answers_something_else])
def test_source_that_violates_the_protocol_is_lost(reply: Callable[[socket.socket], None]) -> None:
    with impostor(reply) as offer, reader("tcp") as peer:
        peer.client.connect("source", offer)
        peer.client.ask("source", OpenSnapshot(number=peer.number(), snapshot=1, proof=""), ReadTarget())
        array = np.zeros(1000, np.uint8)
        peer.client.ask("source", peer.request([PIECE]), read_target([array]))
        events = []
        while not any(isinstance(event, ConnectionLost) for event in events):
            event = peer.event()
            assert event is not None
            events.append(event)
        assert all(isinstance(event, AnswerReceived) and event.answer.number == 1 for event in events[:-1])


def stranger(made: ServedSource, connections: ExitStack) -> socket.socket:
    """Return a connection that presents no ticket."""
    host, _, port = made.address.partition("/")[0].rpartition(":")
    return connections.enter_context(socket.create_connection((host, int(port)), timeout=ANSWER_S))


@pytest.mark.parametrize("transport", [transport for transport in served_transports() if transport != "gloo"])
def test_full_server_takes_a_reader_in_place_of_a_stranger(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "server" if transport == "tcp" else "connections"
    monkeypatch.setattr(f"starling.weightsync.transports.sockets.{module}.MAX_CONNECTIONS", MAX_SHARE + 1)
    with serving(transport, [PIECE]) as made, ExitStack() as connections:
        for _ in range(MAX_SHARE + 1):
            stranger(made, connections)
        assert works(made)


@pytest.mark.campaign
def test_replica_that_takes_all_connections_keeps_no_other_away() -> None:
    with serving("tcp", [PIECE]) as made, ExitStack() as connections:
        own = ticket(made.offer.secret, "rollout-9", "adopt:1:1.1")
        offer = msgspec.structs.replace(made.offer, secret="", ticket=own)
        for rank in range(MAX_CONNECTIONS):
            proof = prove(offer, rank=rank, nonce="0").text
            plain = stranger(made, connections)
            plain.sendall(with_length(OpenSnapshot(number=rank, snapshot=offer.snapshot, proof=proof)))
            (length,) = LENGTH.unpack(plain.recv(LENGTH.size, socket.MSG_WAITALL))
            assert not decode_answer(plain.recv(length, socket.MSG_WAITALL)).reason
        assert works(made)


@pytest.mark.parametrize("transport", [transport for transport in served_transports() if transport != "gloo"])
def test_replica_that_is_late_again_and_again_is_waited_for_no_more(transport: Transport) -> None:
    with serving(transport, [PIECE]) as made, reader(transport) as thief, reader(transport) as honest:
        readers = made.source.readers
        own = ticket(made.offer.secret, "rollout-9", "adopt:1:1.1")
        assert not thief.connect(msgspec.structs.replace(made.offer, secret="", ticket=own)).reason
        for _ in range(MAX_LATE):
            assert readers.are_waited_for(made.offer.snapshot)
            readers.note_late(made.offer.snapshot)
        assert not readers.are_waited_for(made.offer.snapshot)
        assert not honest.connect(made.offer).reason
        assert readers.are_waited_for(made.offer.snapshot)  # for the other one
        assert not honest.release().reason
        assert not readers.are_waited_for(made.offer.snapshot)
        assert not thief.release().reason
        assert readers.are_waited_for(made.offer.snapshot)


def ask(plain: socket.socket, request: OpenSnapshot | ReadBoxes) -> None:
    plain.sendall(with_length(request))


def answer_to(plain: socket.socket) -> SourceAnswer:
    (length,) = LENGTH.unpack(plain.recv(LENGTH.size, socket.MSG_WAITALL))
    return decode_answer(plain.recv(length, socket.MSG_WAITALL))


def test_packing_for_one_replica_is_limited_over_all_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = piece("w", "uint8", (0, 1024), (0, 2048))
    part = piece("w", "uint8", (0, 1024), (0, 1024))  # not contiguous: it must be packed
    boxes = (part,) * 64
    size = 64 << 20  # more than the sockets hold
    monkeypatch.setattr("starling.weightsync.transports.sockets.server.MAX_PACKING_BYTES", size)
    read = ReadBoxes(number=1, tag=1, segments=(64,), boxes=boxes, digests="off", salt=0)
    with serving("tcp", [wide]) as made, ExitStack() as connections, reader("tcp") as honest:
        own = ticket(made.offer.secret, "rollout-9", "adopt:1:1.1")
        offer = msgspec.structs.replace(made.offer, secret="", ticket=own)
        first, second, third = (stranger(made, connections) for _ in range(3))
        for rank, plain in enumerate((first, second, third)):
            proof = prove(offer, rank=rank, nonce="0").text
            ask(plain, OpenSnapshot(number=rank, snapshot=offer.snapshot, proof=proof))
            assert not answer_to(plain).reason
        ask(first, read)
        assert answer_to(first).number == 1
        ask(second, read)
        ask(third, read)
        third.close()  # while it waits: its thread ends
        assert not honest.connect(made.offer).reason
        _, (array,) = honest.read([part])
        assert array.tobytes() == content(part, (1024, 2048)).tobytes()
        assert not select.select([second], [], [], 0.5)[0], "more was packed for the replica than the limit"
        assert len(first.makefile("rb").read(size)) == size
        assert answer_to(second).number == 1


@pytest.mark.skipif(not has_ucx(), reason="UCXX is not installed")
def test_replica_that_receives_nothing_over_ucx_keeps_no_packing_memory_from_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wide = piece("w", "uint8", (0, 1024), (0, 4096))
    part = piece("w", "uint8", (0, 1024), (0, 2048))  # not contiguous: it must be packed
    monkeypatch.setattr("starling.weightsync.transports.ucx.server.MAX_PACKING_BYTES", 1 << 20)
    with serving("ucx", [wide]) as made, reader("ucx") as idle, reader("ucx") as honest:
        own = ticket(made.offer.secret, "rollout-9", "adopt:1:1.1")
        assert not idle.connect(msgspec.structs.replace(made.offer, secret="", ticket=own)).reason
        idle.client.ask("source", idle.request([part]), NO_TARGET)  # it never posts the receive
        assert isinstance(idle.event(), AnswerReceived)  # packed
        assert not honest.connect(made.offer).reason
        _, (array,) = honest.read([part])
        assert array.tobytes() == content(part, (1024, 4096)).tobytes()


@pytest.mark.parametrize("transport", served_transports())
def test_pull_reads_no_more_than_a_few_times_what_it_needs(transport: Transport) -> None:
    with serving(transport, [PIECE]) as made, reader(transport) as greedy, reader(transport) as second:
        offer = make_offer(1, [made.offer])
        cost = reading_cost(PIECE.size_bytes, 1)
        (mine,) = offer_for(offer, "rollout-9", "adopt:1:1.1", 3 * cost, 1).ranks
        assert not greedy.connect(mine).reason
        for _ in range(3):
            assert not greedy.read([PIECE])[0].reason
        opening, proof = second.opening(mine, rank=1)
        second.client.connect("source", mine)
        assert not second.ask(opening, proof=proof).reason
        for each in (greedy, second):  # all ranks together
            each.client.ask("source", each.request([PIECE]), NO_TARGET)
            event = each.event()
            if isinstance(event, AnswerReceived):
                assert SPENT in event.answer.reason
                if transport in ("tcp", "gloo"):  # a socket client reads when it waits for an answer
                    each.client.ask("source", each.request([PIECE]), NO_TARGET)
                event = each.event()
            assert isinstance(event, ConnectionLost), "it would ask again and again"
            each.client.drop("source")
        (again,) = offer_for(offer, "rollout-9", "adopt:1:1.2", 3 * cost, 1).ranks
        assert not greedy.connect(again).reason
        greedy.client.ask("source", greedy.request([PIECE]), NO_TARGET)
        refused = greedy.event()
        assert not isinstance(refused, AnswerReceived) or refused.answer.reason, "more tickets allow no more"
        greedy.client.drop("source")
        for name, incarnation in (("rollout-8", 1), ("rollout-9", 2)):
            (other,) = offer_for(offer, name, f"adopt:1:1.{name}", cost, incarnation).ranks
            assert not greedy.connect(other).reason
            assert not greedy.read([PIECE])[0].reason, "what others have read, and what it has before it was restarted"
            greedy.client.drop("source")


def test_box_that_does_not_arrive_as_it_is_has_arrived_with_its_piece() -> None:
    """To compare it with each box that is missing would take as long as there are boxes, at each look."""
    halves = Box(offset=(0,), size=(500,)), Box(offset=(500,), size=(500,))
    pending = PendingBoxes([(0, half) for half in halves])
    part = Box(offset=(1,), size=(1,))
    assert not any(pending.has(0, one) for one in (*halves, part))
    pending.arrived(0, halves[0])
    assert [pending.has(0, one) for one in (*halves, part)] == [True, False, False]
    pending.arrived(0, halves[1])
    assert all(pending.has(0, one) for one in (*halves, part))
    assert pending.has(1, part), "a piece of which nothing is to arrive"


class Counted(PendingBoxes):
    """Boxes to arrive, with the number of looks at each."""

    looks: Counter[Box]

    def has(self, index: int, box: Box) -> bool:
        """See `PendingBoxes`."""
        self.looks[box] += 1
        return super().has(index, box)


def test_request_that_waits_looks_no_more_at_what_has_arrived() -> None:
    """Each look takes time of the process that pulls, and of its engine: a reader may have many such requests."""
    num_readers, parts = 4, [box_of((begin,), (250,)) for begin in (0, 250, 500, 750)]
    with serving("tcp", [PIECE]) as made, ExitStack() as stack:
        made.source.pending = pending = Counted([(0, one.box) for one in parts])
        pending.looks = Counter()
        for one in parts[:-1]:
            pending.arrived(0, one.box)
        peers = [stack.enter_context(reader("tcp")) for _ in range(num_readers)]
        for rank, peer in enumerate(peers):
            peer.client.connect("source", made.offer)
            opening, proof = peer.opening(made.offer, rank)
            assert not peer.ask(opening, proof=proof).reason
            peer.client.ask("source", peer.request(parts), read_target([np.zeros(250, np.uint8) for _ in parts]))
        assert all(peer.event(0.05) is None for peer in peers), "the last part is missing"
        pending.arrived(0, parts[-1].box)
        assert all(isinstance(peer.event(), AnswerReceived) for peer in peers)
        assert [pending.looks[one.box] for one in parts[:-1]] == [num_readers] * 3


@pytest.mark.skipif(not has_ucx(), reason="UCXX is not installed")
def test_reader_with_too_many_unanswered_requests_over_ucx_is_disconnected() -> None:
    with serving("ucx", [PIECE]) as made, reader("ucx") as other:
        made.source.pending = PendingBoxes([(0, PIECE.box)])  # a relay that has received nothing yet
        assert not other.connect(made.offer).reason
        for _ in range(MAX_WAITING + 1):
            other.client.ask("source", other.request([PIECE]), read_target([np.zeros(1000, np.uint8)]))
        assert isinstance(other.event(), ConnectionLost)


def test_full_server_closes_the_oldest_connection_of_the_replica_with_most() -> None:
    ours, theirs = ["rollout-0"] * MAX_SHARE, ["rollout-9"] * (MAX_SHARE + 1)
    assert surplus([*ours, *theirs]) == MAX_SHARE
    assert surplus([*ours, *theirs, *[""] * (MAX_SHARE + 2)]) == 2 * MAX_SHARE + 1


def test_server_leaves_its_process_a_third_of_the_descriptors() -> None:
    with limited(resource.RLIMIT_NOFILE, 1024):
        assert most_connections() == 341
    assert surplus(["teacher-0"] * 43 + [f"rollout-{number}" for number in range(298)]) == 0
    assert surplus(["teacher-0"] * 42 + [f"rollout-{number}" for number in range(299)]) is None


def test_pull_from_more_sources_than_the_reader_can_connect_to_is_refused() -> None:
    def groups(num: int) -> dict[int, list[RankOffer]]:
        return {
            rank: [
                RankOffer(rank=rank, transport="tcp", address=f"127.0.0.1:{rank + 1}", snapshot=1, holds="", root="")
            ]
            for rank in range(num)
        }

    with (
        ThreadPoolExecutor(1) as pool,
        closing(SourceConnections(pool)) as sources,
        limited(resource.RLIMIT_NOFILE, 1024),
    ):
        assert len(sources.connections(groups(341))) == 341
        with pytest.raises(WeightsError, match="342 sources, and this process may connect to 341"):
            sources.connections(groups(342))


def test_socket_client_hangs_up_all_connections_before_it_waits_for_one() -> None:
    """Each waits for its threads, which took 300 connections several seconds."""
    channels: list[Channel] = []
    hung_up: list[bool] = []

    class Carrier:
        """A carrier that is told when the client waits for its connection."""

        def __init__(self, channel: Channel) -> None:
            channels.append(channel)

        def opened(self) -> None:
            """See `PayloadCarrier`."""

        def send(self, answer: memoryview, segments: Sequence[Memory]) -> None:
            """See `PayloadCarrier`."""

        def receive(self, buffers: Sequence[Memory]) -> None:
            """See `PayloadCarrier`."""

        def close(self) -> None:
            """See `PayloadCarrier`."""
            hung_up.append(all(channel.stop.is_set() for channel in channels))

    with socket.create_server(("127.0.0.1", 0)) as server:
        client = SocketClient("test", Carrier)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        offer = RankOffer(rank=0, transport="tcp", address=address, snapshot=1, holds="", root="")
        for number in range(4):
            client.connect(str(number), offer)
        end = time.monotonic() + ANSWER_S
        while len(channels) < 4 and time.monotonic() < end:
            select.select([], [], [], 0.01)
        client.close()
    assert hung_up == [True] * 4


def test_full_server_of_replicas_with_few_connections_each_takes_no_other() -> None:
    assert surplus([f"rollout-{number // 8}" for number in range(MAX_CONNECTIONS)]) is None


class OneConnection:
    """A connection of which each step raises the given exception, or none."""

    reader = ""

    def __init__(self, plain: socket.socket, error: Exception | None) -> None:
        self._plain, self._error = plain, error

    def advance(self) -> bool:
        if self._error is not None:
            raise self._error
        return True

    def close(self) -> None:
        self._plain.close()


def test_connection_with_an_unexpected_exception_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    errors: Iterator[Exception | None] = iter((KeyError("unexpected"), None))
    connections = ReaderConnections(lambda plain: OneConnection(plain, next(errors)))
    with closing(Listener("127.0.0.1")) as listener, closing(connections):
        first, second = (socket.create_connection(split_address(listener.address), ANSWER_S) for _ in range(2))
        with first, second:
            while len(list(connections)) < 2:
                connections.accept(listener)
            connections.advance()
            assert first.recv(1) == b""
            assert len(list(connections)) == 1
    assert "unexpected" in caplog.text


@pytest.mark.skipif(not has_ucx(), reason="UCXX is not installed")
@pytest.mark.parametrize("data", [os.urandom(4096), b""])
def test_ucx_server_survives_garbage(data: bytes) -> None:
    with serving("ucx", [PIECE]) as made:
        host, _, port = made.address.partition("/")[0].rpartition(":")
        with socket.create_connection((host, int(port)), timeout=20) as plain:
            plain.sendall(data)
        assert works(made)


@pytest.mark.skipif(not has_ucx(), reason="UCXX is not installed")
@pytest.mark.parametrize("size", [3, 100, REQUEST_BYTES + LENGTH.size + 1])
def test_ucx_reader_with_a_malformed_request_is_disconnected(size: int) -> None:
    with serving("ucx", [PIECE]) as made:
        with reader("ucx") as peer:
            assert not peer.connect(made.offer).reason
            send_garbage(peer, size)
            assert isinstance(peer.event(), ConnectionLost)
        assert works(made)


def send_garbage(peer: Reader, size: int) -> None:
    """Send bytes in place of a request. The source may close the connection before it has them all."""
    connection = peer.client._connections["source"]  # type: ignore[attr-defined]
    with suppress(ConnectionError):
        connection.channel.send(REQUEST, b"\xc1" * size)


@contextmanager
def limited(kind: int, most: int) -> Iterator[None]:
    """Limit this process to `most` of the resource `kind`."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def mapped_bytes() -> int:
    """Return the size of this process's address space."""
    with open("/proc/self/statm") as sizes:
        return int(sizes.read().split()[0]) * mmap.PAGESIZE


@pytest.mark.sample(1)
@pytest.mark.parametrize("transport", served_transports())
def test_request_that_cannot_be_packed_ends_only_its_connection(transport: Transport) -> None:
    wide, part = piece("w", "uint8", (0, 256), (0, 512)), piece("w", "uint8", (0, 256), (0, 256))
    with serving(transport, [wide]) as made, reader(transport) as greedy, reader(transport) as modest:
        assert not greedy.connect(made.offer).reason
        boxes = [part] * MAX_TRANSFERS
        buffer = np.zeros(sum(box.size_bytes for box in boxes), np.uint8)
        gc.collect()  # what it freed later would be memory for the request
        with limited(resource.RLIMIT_AS, mapped_bytes() + buffer.nbytes // 4):
            greedy.client.ask("source", greedy.request(boxes, [len(boxes)]), ReadTarget(buffers=[buffer]))
            assert isinstance(greedy.event(), ConnectionLost)
        assert not modest.connect(made.offer).reason
        _, (array,) = modest.read([part])
        assert array.tobytes() == content(part, (256, 512)).tobytes()


@contextmanager
def no_more_descriptors() -> Iterator[None]:
    lowest = os.dup(0)
    os.close(lowest)
    with limited(resource.RLIMIT_NOFILE, lowest):
        yield


@contextmanager
def no_more_threads() -> Iterator[None]:
    before = threading.stack_size(1 << 47)  # more than there is address space
    try:
        yield
    finally:
        threading.stack_size(before)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("transport", "nothing_left"),
    [
        ("tcp", no_more_descriptors),
        ("tcp", no_more_threads),
        pytest.param("nixl", no_more_descriptors, marks=needs_nixl),
    ],
)
def test_server_without_free_descriptors_serves_existing_readers(
    transport: Transport, nothing_left: Callable[[], AbstractContextManager[None]], caplog: pytest.LogCaptureFixture
) -> None:
    with serving(transport, [PIECE]) as made, reader(transport) as known, socket.socket() as caller:
        assert not known.connect(made.offer).reason
        assert not known.read([PIECE])[0].reason
        host, _, port = made.address.rpartition(":")
        with nothing_left():
            caller.connect((host, int(port)))
            end = time.monotonic() + ANSWER_S
            while "a reader cannot be served now" not in caplog.text and time.monotonic() < end:
                known.event(0.01)
            assert not known.read([PIECE])[0].reason
        assert works(made)


@pytest.mark.parametrize("length", [1, 20_000, REQUEST_BYTES])
def test_message_takes_no_memory_before_it_has_arrived(length: int) -> None:
    """Anyone may announce the longest one over a thousand connections, without a ticket."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = socket.create_connection(listener.getsockname())
        one, _ = listener.accept()
    with one, other, ThreadPoolExecutor(1) as pool:
        channel, body = Channel(one, threading.Event()), random.Random(length).randbytes(length)
        tracemalloc.start()
        try:
            message = pool.submit(channel.receive_message, REQUEST_BYTES, time.monotonic() + 60.0)
            other.sendall(LENGTH.pack(length))
            time.sleep(0.2)  # for the thread to read it; if it has not, the test proves less
            assert tracemalloc.get_traced_memory()[0] < 200_000
            other.sendall(body[:-1])
            other.sendall(body[-1:])
            assert message.result(60.0) == body
        finally:
            tracemalloc.stop()
