"""Pair groups: authentication, matching operations at both ends, and bounded waits."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from transport_peers import ANSWER_S, ServedSource, content, opening, piece, read_target, reader, serving

from starling.common.errors import WeightsError
from starling.weightsync.memory.arena import Arena
from starling.weightsync.offers.offer import RankOffer
from starling.weightsync.plan.layout import ShardPiece
from starling.weightsync.transports.base import AnswerReceived, ConnectionLost
from starling.weightsync.transports.collective import (
    _READER,
    _SECRET,
    _SOURCE,
    MAX_ENTRIES,
    _ChannelStore,
    _Gloo,
    _Pair,
    _tensor,
    collective_client,
)
from starling.weightsync.transports.endpoints import IDLE_TIMEOUT_S, split_address
from starling.weightsync.transports.messages import (
    ANSWER_BYTES,
    REQUEST_BYTES,
    OpenSnapshot,
    ReadBoxes,
    SourceAnswer,
    StoreEntry,
    decode_answer,
    decode_request,
)
from starling.weightsync.transports.registry import serve
from starling.weightsync.transports.sockets.channel import Channel, framed
from starling.weightsync.transports.source import SnapshotSource

torch.set_num_threads(1)
LARGE = piece("large", "uint8", (0, 32 << 20))
HALVES = (1 << 20, 64 << 20)
"""The second is more than socket buffers hold."""
MIDDLE = piece("middle", "uint8", (0, 300_000))
SMALL = piece("small", "uint8", (0, 1000))
TABLE = piece("table", "int16", (0, 40), (0, 30))
EMPTY = piece("table", "int16", (0, 0), (0, 30))
MISSING = piece("missing", "uint8", (0, 10))


@pytest.fixture(scope="module")
def served() -> Iterator[ServedSource]:
    with serving("gloo", [MIDDLE, SMALL, TABLE]) as made:
        yield made


def works(made: ServedSource) -> bool:
    with reader("gloo") as peer:
        answer = peer.connect(made.offer)
        _, arrays = peer.read([SMALL])
        return not answer.reason and arrays[0].tobytes() == content(SMALL, (1000,)).tobytes()


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def settles(num: int) -> bool:
    """Return whether this process has at most that many threads soon."""
    end = time.monotonic() + ANSWER_S
    while num_threads() > num and time.monotonic() < end:
        time.sleep(0.02)
    return num_threads() <= num


@contextmanager
def raw_reader(made: ServedSource) -> Iterator[tuple[Channel, _Pair]]:
    """Open a raw channel to the source, and a carrier for it."""
    channel = Channel(socket.create_connection(split_address(made.address)), threading.Event())
    pair = _Pair(_Gloo(), _READER, channel)
    try:
        yield channel, pair
    finally:
        pair.close()
        channel.close()


def present_token(made: ServedSource, channel: Channel) -> None:
    channel.send([framed(opening(made.offer))])
    assert not decode_answer(channel.receive_message(ANSWER_BYTES, time.monotonic() + ANSWER_S)).reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
def test_nccl_without_cuda_names_the_remedy() -> None:
    remedy = r"Transport 'nccl' needs CUDA, and there is none here: choose 'gloo', 'tcp' or 'ucx'\."
    with pytest.raises(WeightsError, match=remedy):
        collective_client("nccl")
    arena = Arena([SMALL])
    try:
        with pytest.raises(WeightsError, match=remedy):
            serve(SnapshotSource(arena, [SMALL]), "nccl", "127.0.0.1")
    finally:
        arena.close()


def test_default_process_group_is_not_touched(served: ServedSource) -> None:
    assert not dist.is_initialized()
    assert works(served)
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert works(served)
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total.tolist() == [1, 1, 1]
    finally:
        dist.destroy_process_group()
    assert works(served)


@examples(20)
@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from([SMALL, TABLE, EMPTY, MIDDLE]), min_size=1, max_size=4),
            st.booleans(),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_both_ends_post_the_same_operations(served: ServedSource, reads: list[tuple[list[ShardPiece], bool]]) -> None:
    """Segments of any sizes, empty ones included, and refusals in between, all requested ahead of the answers."""
    with reader("gloo") as peer:
        assert not peer.connect(served.offer).reason
        asked = []
        for boxes, spoiled in reads:
            arrays = [np.zeros(box.box.size, "u2" if box.dtype == "int16" else "u1") for box in boxes]
            request = peer.request([*boxes[:-1], MISSING] if spoiled else boxes, digests="off")
            peer.client.ask("source", request, read_target(arrays))
            asked.append((request, boxes, arrays, spoiled))
        for request, boxes, arrays, spoiled in asked:
            event = peer.event()
            assert isinstance(event, AnswerReceived), event
            assert event.answer.number == request.number
            assert bool(event.answer.reason) == spoiled
            for box, array in zip(boxes, arrays, strict=True):
                shape = next(held.box.size for held in served.pieces if held.names == box.names)
                truth = content(box, shape)
                assert not array.any() if spoiled else array.tobytes() == truth.tobytes()


def test_one_group_serves_many_snapshots() -> None:
    with serving("gloo", [SMALL]) as made, reader("gloo") as peer:
        peer.connect(made.offer)
        before = num_threads()
        for _ in range(3):
            offer = made.publish()
            request = peer.opening(offer)[0]
            assert not peer.ask(request).reason
            assert peer.read([SMALL])[1][0].tobytes() == content(SMALL, (1000,)).tobytes()
            assert not peer.release().reason
        assert num_threads() <= before


# --- readers that violate the protocol ---


def leave(channel: Channel, _: _Pair) -> None:
    channel.hang_up()


def send_garbage(channel: Channel, _: _Pair) -> None:
    channel.send([memoryview(bytes(200))])


def send_wrong_secret(channel: Channel, pair: _Pair) -> None:
    store = _ChannelStore(channel)
    pair._group = pair._backend.form(store, _READER, channel.host)
    pair._store = store
    assert len(store.get(_SECRET)) == 32
    pair._exchange(pair._backend.send, bytearray(32))
    store.detach()


@pytest.mark.parametrize("act", [leave, send_garbage, send_wrong_secret])
def test_reader_that_violates_the_handshake_is_disconnected(
    served: ServedSource, act: Callable[[Channel, _Pair], None]
) -> None:
    with raw_reader(served) as (channel, pair):
        present_token(served, channel)
        with pytest.raises(ConnectionError):
            act_until_closed(act, channel, pair)
    assert works(served)


def act_until_closed(act: Callable[[Channel, _Pair], None], channel: Channel, pair: _Pair) -> None:
    act(channel, pair)
    while True:
        channel.receive_message(ANSWER_BYTES, time.monotonic() + ANSWER_S)


def test_store_keeps_no_entries_without_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours, (theirs, _) = socket.create_connection(listener.getsockname()), listener.accept()
    stop = threading.Event()
    with ours, theirs:
        store, peer = _ChannelStore(Channel(ours, stop)), Channel(theirs, stop)
        peer.send([framed(StoreEntry(key=f"key {number}", value=b"")) for number in range(MAX_ENTRIES + 1)])
        with pytest.raises(WeightsError, match=f"more than {MAX_ENTRIES} entries"):
            store.get("another")


def test_no_group_is_formed_before_the_token(served: ServedSource) -> None:
    before = num_threads()
    with raw_reader(served) as (channel, _):
        channel.send([framed(OpenSnapshot(number=1, snapshot=served.offer.snapshot, proof="0" * 32))])
        assert "wrong" in decode_answer(channel.receive_message(ANSWER_BYTES, time.monotonic() + ANSWER_S)).reason
        channel.send([framed(StoreEntry(key="0/1", value=b"address"))])
        with pytest.raises(ConnectionError):
            channel.receive_message(ANSWER_BYTES, time.monotonic() + ANSWER_S)
    assert settles(before)


def test_reader_that_receives_nothing_does_not_block_close() -> None:
    before = num_threads()
    with serving("gloo", [LARGE]) as made:
        with raw_reader(made) as (channel, pair):
            present_token(made, channel)
            pair.opened()
            channel.send([framed(ReadBoxes(number=2, tag=2, segments=(1,), boxes=(LARGE,), digests="off", salt=0))])
            assert not decode_answer(channel.receive_message(ANSWER_BYTES, time.monotonic() + ANSWER_S)).reason
            made.server.close(5.0)
        del pair
    assert settles(before)


# --- sources that violate the protocol ---


@contextmanager
def impostor(act: Callable[[Channel, _Pair], None]) -> Iterator[RankOffer]:
    """Run a source that grants the first request, then calls `act`."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def run() -> None:
            connection, _ = listener.accept()
            with connection:
                channel = Channel(connection, threading.Event())
                pair = _Pair(_Gloo(), _SOURCE, channel)
                grant(channel)
                try:
                    act(channel, pair)
                finally:
                    pair.close()

        done = pool.submit(run)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        yield RankOffer(rank=0, transport="gloo", address=address, snapshot=1, holds="", root="")
        done.result(ANSWER_S)


def grant(channel: Channel) -> None:
    request = decode_request(channel.receive_message(REQUEST_BYTES, time.monotonic() + ANSWER_S))
    channel.send([framed(SourceAnswer(number=request.number))])


def hang_up_early(channel: Channel, pair: _Pair) -> None:
    channel.hang_up()


def send_nonsense(channel: Channel, pair: _Pair) -> None:
    channel.send([memoryview(bytes(200))])


def part_too_early(channel: Channel, pair: _Pair) -> None:
    channel.send([framed(StoreEntry(key="", value=b""))])


def break_off(channel: Channel, pair: _Pair) -> None:
    """Send half of a payload: gloo lets a receiver wait for the rest of a message that has begun."""
    pair.opened()
    grant(channel)
    begin, rest = (_tensor(np.ones(size, np.uint8)) for size in HALVES)
    works = [pair._group.send([part], _READER, 0) for part in (begin, rest)]
    works[0].wait(timedelta(seconds=ANSWER_S))


@pytest.mark.parametrize("act", [hang_up_early, send_nonsense, part_too_early, break_off])
def test_source_that_aborts_is_lost(act: Callable[[Channel, _Pair], None]) -> None:
    with impostor(act) as offer, reader("gloo") as peer:
        peer.client.connect("source", offer)
        peer.client.ask("source", OpenSnapshot(number=peer.number(), snapshot=1, proof=""), read_target([]))
        boxes = [piece("half", "uint8", (0, size)) for size in HALVES]
        peer.client.ask("source", peer.request(boxes), read_target([np.zeros(size, np.uint8) for size in HALVES]))
        events = []
        while not any(isinstance(event, ConnectionLost) for event in events):
            event = peer.event(IDLE_TIMEOUT_S / 2)
            assert event is not None, "a source that has left is waited for"
            events.append(event)
        assert len(events) == (2 if act is break_off else 1)


def test_late_payload_of_a_stopped_source_is_not_written() -> None:
    """The connection is dropped after one segment of a payload; then the source continues."""
    dropped = threading.Event()

    def pause(channel: Channel, pair: _Pair) -> None:
        pair.opened()
        grant(channel)
        segment = _tensor(np.ones(1 << 20, np.uint8))
        pair._group.send([segment], _READER, 0).wait(timedelta(seconds=ANSWER_S))
        assert dropped.wait(ANSWER_S)
        with pytest.raises(RuntimeError):
            pair._move(pair._backend.send, [segment])

    with impostor(pause) as offer, reader("gloo") as peer:
        assert not peer.connect(offer).reason
        arrays = [np.zeros(1 << 20, np.uint8) for _ in range(2)]
        peer.client.ask("source", peer.request([piece("s", "uint8", (0, 1 << 20))] * 2), read_target(arrays))
        end = time.monotonic() + ANSWER_S
        while not arrays[0].all() and time.monotonic() < end:
            peer.client.poll(0.01)
        assert arrays[0].all()
        peer.client.drop("source")
        dropped.set()
    assert not arrays[1].any()


def test_drop_in_mid_message_does_not_wait_for_the_rest() -> None:
    with serving("gloo", [LARGE]) as made, reader("gloo") as peer:
        for number in range(3):
            name = f"source-{number}"
            assert not peer.connect(made.offer, name).reason
            array = np.zeros(LARGE.size_bytes, np.uint8)
            peer.client.ask(name, peer.request([LARGE], digests="off"), read_target([array]))
            end = time.monotonic() + ANSWER_S
            while not array[:64].any() and time.monotonic() < end:
                time.sleep(0.0001)
            begin = time.monotonic()
            peer.client.drop(name)
            assert time.monotonic() - begin < IDLE_TIMEOUT_S / 2, "the rest of a message was waited for"
            kept = array.copy()
            assert peer.event(0.05) is None
            assert (array == kept).all()
            assert kept[:64].any()


def test_reader_stopped_during_the_handshake_ends_at_once() -> None:
    """The source sends nothing, and no error says so."""
    ended = threading.Event()

    def wait(channel: Channel, pair: _Pair) -> None:
        assert ended.wait(ANSWER_S)

    before = num_threads()
    with impostor(wait) as offer, reader("gloo") as peer:
        peer.client.connect("source", offer)
        peer.client.ask("source", OpenSnapshot(number=1, snapshot=1, proof=""), read_target([]))
        assert peer.event(0.3) is None
        peer.client.drop("source")
        ended.set()
    assert settles(before)
