"""Conformance suite of all transports: exact payloads, refusals, and lost peers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import xxhash
from covering import covering
from transport_peers import (
    AnyTransport,
    Reader,
    ServedSource,
    content,
    needs_nixl,
    opening,
    piece,
    read_target,
    reader,
    remote_source,
    serving,
)

from starling.common.errors import WeightsError
from starling.weightsync.offers.tickets import ticket
from starling.weightsync.plan.layout import ITEM_BYTES, ShardPiece
from starling.weightsync.transports.base import AnswerReceived, ConnectionLost, ReadTarget
from starling.weightsync.transports.messages import OpenSnapshot, ReadBoxes
from starling.weightsync.transports.source import MAX_REFUSED, LastRefusalError, PendingBoxes, ReaderSession
from starling.weightsync.transports.ucx.worker import has_ucx

MIB = 1 << 20
LARGEST = (1 << 30) if os.environ.get("STARLING_LARGE_TESTS") else 24 * MIB
SIZES = (1, 7, 63, 64, 65, 4095, 4096, 4097, (64 << 10) - 1, 64 << 10, MIB + 3, LARGEST)
SHAPES = {"w": (37, 53), "x": (64, 256, 3), "s": (), "none": (0, 4)}
DTYPES = ("bfloat16", "float8_e4m3fn", "int8", "bool", "float32", "complex64")


@pytest.fixture(
    scope="module", params=["local", "tcp", "tcp+aes", "gloo", "ucx", pytest.param("nixl", marks=needs_nixl)]
)
def transport(request: pytest.FixtureRequest) -> AnyTransport:
    if request.param == "ucx" and not has_ucx():
        pytest.skip("UCXX is not installed")
    kind: AnyTransport = request.param
    return kind


def whole(name: str, dtype: str, shape: tuple[int, ...]) -> ShardPiece:
    return piece(name, dtype, *((0, n) for n in shape))


PIECES = (
    *(whole(f"flat{size}", "uint8", (size,)) for size in SIZES),
    *(whole(f"{name}.{dtype}", dtype, shape) for name, shape in SHAPES.items() for dtype in DTYPES),
    *(whole(f"small{index}", "bfloat16", (index % 5 + 1, 3)) for index in range(1000)),
)


@pytest.fixture(scope="module")
def source(transport: AnyTransport) -> Iterator[ServedSource]:
    with serving(transport, PIECES) as made:
        yield made


@pytest.fixture
def peer(source: ServedSource, transport: AnyTransport) -> Iterator[Reader]:
    with reader(transport) as made:
        assert not made.connect(source.offer).reason
        yield made


def expected(wanted: ShardPiece) -> np.ndarray:
    shape = next(p.box.size for p in PIECES if p.names == wanted.names)
    return content(wanted, shape)


def check(peer: Reader, boxes: list[ShardPiece]) -> None:
    answer, arrays = peer.read(boxes)
    assert not answer.reason
    for index, (wanted, array) in enumerate(zip(boxes, arrays, strict=True)):
        truth = np.ascontiguousarray(expected(wanted))
        assert array.tobytes() == truth.tobytes(), wanted
        assert answer.digests[16 * index :][:16] == xxhash.xxh3_128_digest(truth.tobytes())


@pytest.mark.sample(12)
@pytest.mark.parametrize("size", SIZES)
def test_every_size_arrives(peer: Reader, size: int) -> None:
    check(peer, [whole(f"flat{size}", "uint8", (size,))])


@pytest.mark.sample(3)
@pytest.mark.parametrize("begin", [1, 3, 64, 4093])
def test_unaligned_parts_arrive(peer: Reader, begin: int) -> None:
    check(peer, [piece(f"flat{MIB + 3}", "uint8", (begin, end)) for end in (begin + 1, begin + 77, MIB + begin % 3)])


@pytest.mark.sample(12)
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_parts_of_every_element_type_arrive(peer: Reader, dtype: str) -> None:
    boxes = [
        piece(f"w.{dtype}", dtype, (0, 37), (11, 12)),
        piece(f"w.{dtype}", dtype, (5, 9), (0, 53)),
        piece(f"w.{dtype}", dtype, (1, 36), (1, 52)),
        piece(f"x.{dtype}", dtype, (0, 64), (0, 256), (1, 3)),
        piece(f"x.{dtype}", dtype, (3, 60), (7, 200), (0, 3)),
        piece(f"s.{dtype}", dtype),
        piece(f"none.{dtype}", dtype, (0, 0), (0, 4)),
    ]
    check(peer, boxes)


@pytest.mark.sample(2)
def test_many_small_boxes_arrive(peer: Reader) -> None:
    check(peer, [p for p in PIECES if p.names[0].startswith("small")])


def test_boxes_of_a_segment_are_aligned(peer: Reader, source: ServedSource) -> None:
    boxes = [piece("w.int8", "int8", (0, 37), (11, 12)), piece("w.int8", "int8", (5, 9), (0, 53)), PIECES[3]]
    buffer = np.zeros(37 + 27 + 212 + 44 + 64, np.uint8)
    arrays = [np.ndarray(b.box.size, "u1", buffer, offset) for b, offset in zip(boxes, (0, 64, 320), strict=True)]
    answer = peer.ask(peer.request(boxes, (3,)), ReadTarget(tuple(arrays), (buffer,)))
    assert not answer.reason
    for wanted, array in zip(boxes, arrays, strict=True):
        assert array.tobytes() == expected(wanted).tobytes()


def test_several_requests_in_flight_are_answered(peer: Reader) -> None:
    wanted = [piece(f"flat{MIB + 3}", "uint8", (begin, begin + 50_000)) for begin in range(0, 1_000_000, 100_000)]
    arrays = [np.zeros(50_000, np.uint8) for _ in wanted]
    for each, array in zip(wanted, arrays, strict=True):
        peer.client.ask("source", peer.request([each]), read_target([array]))
    answered = 0
    end = time.monotonic() + 20
    while answered < len(wanted) and time.monotonic() < end:
        answered += len(peer.client.poll(0.02))
    assert answered == len(wanted)
    for each, array in zip(wanted, arrays, strict=True):
        assert array.tobytes() == expected(each).tobytes()


def test_many_readers_are_served_concurrently(source: ServedSource, transport: AnyTransport) -> None:
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            with reader(transport) as made:
                assert not made.connect(source.offer).reason
                check(made, [piece(f"flat{MIB + 3}", "uint8", (number, MIB)), whole("flat65", "uint8", (65,))])
                assert not made.release().reason
        except BaseException as error:  # noqa: BLE001 - to be raised in the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures


def test_digest_of_a_box_is_computed_once(source: ServedSource, transport: AnyTransport) -> None:
    if transport == "local":
        pytest.skip("a local reader digests what passes by")
    wanted = [piece("x.float32", "float32", (0, 64), (0, 100), (0, 2))]
    cache = source.source.cache(source.offer.snapshot)
    before = cache.num_computed
    for _ in range(3):
        with reader(transport) as made:
            made.connect(source.offer)
            check(made, wanted)
    assert cache.num_computed == before + 1


@pytest.mark.parametrize("secret", ["0" * 32, "", "é"])
def test_wrong_secret_is_refused(source: ServedSource, transport: AnyTransport, secret: str) -> None:
    with reader(transport) as made:
        assert "ticket" in made.connect(msgspec.structs.replace(source.offer, secret=secret)).reason
        answer, arrays = made.read([whole("flat63", "uint8", (63,))])
        assert "ticket first" in answer.reason
        assert (arrays[0][1:] == 0xFF).all()
        assert not made.open(source.offer).reason


def test_ticket_opens_a_snapshot_once(source: ServedSource, transport: AnyTransport) -> None:
    """A listener replays the proof; a thief proves the stolen ticket anew."""
    if transport == "local":
        pytest.skip("a local reader maps the memory itself: no source decides")
    offer = msgspec.structs.replace(source.offer, ticket=ticket(source.offer.secret, "rollout-1", "adopt:1:1.1"))
    with reader(transport) as mine, reader(transport) as other:
        request, proof = mine.opening(offer)
        mine.client.connect("source", offer)
        assert not mine.ask(request, proof=proof).reason
        other.client.connect("source", offer)
        assert "was used before" in other.ask(request).reason
        other.number()
        assert "was used before" in other.open(offer).reason
        answer, _ = other.read([whole("flat63", "uint8", (63,))])
        assert "ticket first" in answer.reason
        assert not mine.read([whole("flat63", "uint8", (63,))])[0].reason
        assert not mine.release().reason
        assert "was used before" in mine.open(offer).reason


def test_ranks_of_a_reader_share_its_ticket(source: ServedSource, transport: AnyTransport) -> None:
    offer = msgspec.structs.replace(source.offer, ticket=ticket(source.offer.secret, "rollout-1", "adopt:1:1.2"))
    for rank in range(2):
        with reader(transport) as made:
            made.client.connect("source", offer)
            request, proof = made.opening(offer, rank)
            assert not made.ask(request, proof=proof).reason
            check(made, [whole("flat63", "uint8", (63,))])


def test_ticket_of_another_version_is_refused(transport: AnyTransport) -> None:
    with serving(transport, PIECES[:4]) as made, reader(transport) as late:
        newer = made.publish()
        stale = msgspec.structs.replace(newer, ticket=ticket(made.offer.secret, "rollout-1", "adopt:1:1.1"))
        assert "is wrong" in late.connect(stale).reason
        replayed = msgspec.structs.replace(late.opening(made.offer)[0], snapshot=newer.snapshot)
        assert "is wrong" in late.ask(replayed).reason
        assert not late.open(newer).reason


def test_read_before_the_token_is_refused(source: ServedSource, transport: AnyTransport) -> None:
    with reader(transport) as made:
        made.client.connect("source", source.offer)
        answer, _ = made.read([whole("flat63", "uint8", (63,))])
        assert "open a snapshot with its ticket first" in answer.reason
        assert "ticket first" in made.release().reason


@pytest.mark.sample(7)
@pytest.mark.parametrize(
    "wanted",
    [
        piece("flat63", "uint8", (0, 64)),
        piece("flat63", "uint8", (60, 70)),
        piece("w.int8", "int8", (0, 38), (0, 53)),
        piece("w.int8", "int8", (0, 37)),
        piece("w.int8", "uint8", (0, 37), (0, 53)),
        piece("nowhere", "uint8", (0, 1)),
        piece("flat63", "uint8", (1 << 40, (1 << 40) + 1)),
    ],
)
def test_unknown_box_is_refused_and_the_connection_survives(peer: Reader, wanted: ShardPiece) -> None:
    array = np.zeros(1, np.uint8) if wanted.box.volume > 4096 else np.zeros(wanted.box.size, np.uint8)
    answer = peer.ask(peer.request([wanted]), read_target([array]))
    assert "is not held by this rank" in answer.reason
    check(peer, [whole("flat65", "uint8", (65,))])


def test_open_of_an_overwritten_snapshot_is_refused(transport: AnyTransport) -> None:
    with serving(transport, PIECES[:4]) as made, reader(transport) as late:
        old = made.offer
        made.publish()
        made.publish()
        assert "is gone" in late.connect(old).reason


def test_read_of_a_revoked_snapshot_is_refused(transport: AnyTransport) -> None:
    with serving(transport, PIECES[:4]) as made, reader(transport) as slow:
        assert not slow.connect(made.offer).reason
        for _ in range(4):
            made.arena.claim(0.0)
            made.arena.revoke_all()
        answer, _ = slow.read([PIECES[2]])
        assert "revoked while it was read" in answer.reason
        assert "revoked" in slow.release().reason or "ticket first" in slow.ask(slow.request([PIECES[2]])).reason


@pytest.mark.sample(2)
def test_source_that_waits_itself_says_so_until_it_answers(transport: AnyTransport) -> None:
    if transport == "local":
        pytest.skip("its readers do not wait for what has not arrived")
    wanted = PIECES[3]
    with serving(transport, PIECES[:4]) as made, reader(transport) as one:
        made.source.pending = PendingBoxes([(3, wanted.box)])  # a relay that has not received it yet
        assert not one.connect(made.offer).reason
        array = np.zeros(wanted.box.size, np.uint8)
        request = one.request([wanted])
        one.client.ask("source", request, read_target([array]))
        for _ in range(2):
            event = one.event()
            assert isinstance(event, AnswerReceived)
            assert (event.answer.number, event.answer.waiting) == (request.number, True)
        made.source.pending.arrived(3, wanted.box)
        made.server.wake()
        while (event := one.event()) is not None and isinstance(event, AnswerReceived) and event.answer.waiting:
            pass
        assert isinstance(event, AnswerReceived)
        assert not event.answer.reason
        assert np.array_equal(array, content(wanted, wanted.box.size))


def test_box_is_refused_when_its_snapshot_is_revoked_while_it_is_digested(transport: AnyTransport) -> None:
    """Its digest may be of other bits, which it would prove."""
    with serving(transport, PIECES[:4]) as made:
        session = ReaderSession(made.source)
        session.grant(opening(made.offer))
        grant = session.grant(ReadBoxes(number=2, tag=2, segments=(1,), boxes=(PIECES[3],), digests="full", salt=0))
        assert not grant.answer(2).reason
        made.arena.revoke_all()
        assert "revoked while it was read" in grant.answer(2).reason
        session.close()


def test_slow_reader_that_opens_each_version_keeps_its_connection(transport: AnyTransport) -> None:
    with serving(transport, PIECES[:4]) as made:
        session, offer = ReaderSession(made.source), made.offer
        for _ in range(MAX_REFUSED):
            session.grant(opening(offer))
            made.arena.revoke_all()
            for _ in range(2):
                with pytest.raises(WeightsError, match="revoked") as refused:
                    session.grant(ReadBoxes(number=2, tag=2, segments=(1,), boxes=(PIECES[3],), digests="full", salt=0))
                assert not isinstance(refused.value, LastRefusalError)
            offer = made.publish()
        session.close()


def test_release_ends_the_lease(transport: AnyTransport) -> None:
    with serving(transport, PIECES[:4]) as made, reader(transport) as one:
        one.connect(made.offer)
        made.publish()
        made.arena.claim(0.0, "wait")  # the newer slot is free
        made.arena.revoke_all()
    with serving(transport, PIECES[:4]) as made, reader(transport) as one, reader(transport) as two:
        one.connect(made.offer)
        two.connect(made.publish())
        with pytest.raises(WeightsError, match="still being read"):
            made.arena.claim(0.0, "skip")
        assert not one.release().reason
        made.arena.claim(5.0, "wait")


def test_missing_source_is_lost(transport: AnyTransport) -> None:
    with serving(transport, PIECES[:1]) as made:
        offer = made.offer
    with reader(transport) as made:
        try:
            made.client.connect("source", offer)
        except WeightsError:
            return
        made.client.ask("source", OpenSnapshot(number=1, snapshot=1, proof=""), ReadTarget())
        assert isinstance(made.event(), ConnectionLost)


@pytest.mark.parametrize("address", ["", "nowhere", "127.0.0.1:", "127.0.0.1:99999", "/etc/passwd", "h:1/zz"])
def test_malformed_address_is_refused(source: ServedSource, transport: AnyTransport, address: str) -> None:
    with reader(transport) as made, pytest.raises(WeightsError, match=r"is not (the address|an address)"):
        made.client.connect("source", msgspec.structs.replace(source.offer, address=address))


@pytest.mark.sample(2)
@pytest.mark.system
@pytest.mark.parametrize(
    ("stage", "number"), covering(["connected", "asked", "opened", "read"], [signal.SIGKILL, signal.SIGSTOP])
)
def test_source_killed_or_stopped_at_any_stage_is_handled(
    transport: AnyTransport, stage: str, number: signal.Signals
) -> None:
    size = 16 * MIB
    wanted = whole("big", "uint8", (size,))
    with remote_source(transport, [wanted]) as other, reader(transport) as made:
        array = np.zeros(size, np.uint8)
        made.client.connect("source", other.offer)
        opening, proof = made.opening(other.offer)
        if stage != "connected":
            assert not made.ask(opening, proof=proof).reason
        if stage == "read":
            assert not made.read([wanted])[0].reason
        if stage == "asked":
            made.client.ask("source", made.request([wanted]), read_target([array]))
        other.signal(number)
        if stage == "connected":
            made.client.ask("source", opening, ReadTarget(), proof)
        elif stage != "asked":
            made.client.ask("source", made.request([wanted]), read_target([array]))
        event = made.event(0.2 if number == signal.SIGSTOP else 20.0)
        whole_arrived = event is not None and not isinstance(event, ConnectionLost) and stage != "connected"
        if whole_arrived:
            assert array.tobytes() == content(wanted, (size,)).tobytes()
        elif number == signal.SIGKILL and transport != "local":
            assert isinstance(event, ConnectionLost)
        begin = time.monotonic()
        made.client.drop("source")
        assert time.monotonic() - begin < 5.0, "dropping a stopped source takes too long"
        before = array.copy()
        if number == signal.SIGSTOP:
            other.signal(signal.SIGCONT)
            made.event(0.1)
            assert (array == before).all(), "memory was written after its connection was dropped"


@pytest.mark.sample(2)
def test_dropped_connection_is_silent_and_can_be_reopened(source: ServedSource, transport: AnyTransport) -> None:
    size = SIZES[-1] if SIZES[-1] < 64 * MIB else 64 * MIB
    wanted = piece(f"flat{SIZES[-1]}", "uint8", (0, size))
    with reader(transport) as made:
        made.connect(source.offer)
        array = np.zeros(size, np.uint8)
        made.client.ask("source", made.request([wanted]), read_target([array]))
        made.client.drop("source")
        made.client.drop("source")
        kept = array.copy()
        assert made.event(0.1) is None
        assert (array == kept).all()
        assert not made.connect(source.offer).reason
        check(made, [whole("flat4097", "uint8", (4097,))])


def test_lanes_are_reported(peer: Reader, transport: AnyTransport) -> None:
    lanes = peer.client.lanes("source")
    wanted = {
        "local": "shared memory",
        "tcp": "tcp",
        "tcp+aes": "tcp+aes-gcm",
        "gloo": "gloo",
        "ucx": "cma/memory",
        "nixl": "nixl/UCX",
    }
    assert wanted[transport] in lanes
    assert peer.client.lanes("unknown") in ((), lanes)


def test_suite_covers_every_element_size() -> None:
    assert {ITEM_BYTES[dtype] for dtype in DTYPES} == {1, 2, 4, 8}
