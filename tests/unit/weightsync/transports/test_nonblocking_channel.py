"""Non-blocking channel: messages arrive complete and in order, however the bytes are split."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starling.common.errors import WeightsError
from starling.weightsync.transports.sockets.nonblocking import NonBlockingChannel

LONGEST = 1 << 20
WAIT_MS = 20_000


def messages_of(channel: NonBlockingChannel, num: int) -> list[tuple[int, bytes]]:
    """Receive `num` messages."""
    found: list[tuple[int, bytes]] = []
    poller = select.poll()
    poller.register(channel, select.POLLIN)
    while len(found) < num:
        assert poller.poll(WAIT_MS), "nothing arrives"
        found += channel.receive()
    return found


@pytest.fixture
def pair() -> Iterator[tuple[NonBlockingChannel, socket.socket]]:
    ours, theirs = tcp_pair()
    channel = NonBlockingChannel(ours, LONGEST)
    yield channel, theirs
    channel.close()
    theirs.close()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname(), timeout=20)
        return ours, listener.accept()[0]


def framed(kind: int, body: bytes) -> bytes:
    return struct.pack("<IB", len(body), kind) + body


@given(
    messages=st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=200)), min_size=1, max_size=20),
    cuts=st.lists(st.integers(1, 300), min_size=1),
)
def test_messages_arrive_whole_and_in_order(messages: list[tuple[int, bytes]], cuts: list[int]) -> None:
    ours, theirs = tcp_pair()
    channel = NonBlockingChannel(ours, LONGEST)
    stream = b"".join(framed(kind, body) for kind, body in messages)
    found: list[tuple[int, bytes]] = []
    with theirs:
        begin = 0
        while begin < len(stream):
            cut = cuts[begin % len(cuts)]
            theirs.sendall(stream[begin : begin + cut])
            found += channel.receive()
            begin += cut
        found += messages_of(channel, len(messages) - len(found))
    channel.close()
    assert found == messages


def test_peer_that_always_sends_does_not_keep_the_thread() -> None:
    ours, theirs = tcp_pair()
    longest = 64 << 10
    channel = NonBlockingChannel(ours, longest)
    message = framed(7, bytes(1000))
    theirs.setblocking(False)
    sent = 0
    with theirs, suppress(BlockingIOError):
        while True:
            sent += theirs.send(message * 1000)
            found = channel.receive()
            assert len(found) * len(message) <= 2 * longest + len(message)
            if sent > 4 << 20:
                break
    channel.close()


def test_peer_that_receives_less_than_it_requests_is_disconnected() -> None:
    ours, theirs = tcp_pair()
    channel = NonBlockingChannel(ours, LONGEST, most_queued=LONGEST)
    body = bytes(64 * LONGEST)  # more than the sockets hold
    with theirs, pytest.raises(ConnectionError, match="receives too slowly"):
        channel.send(7, body)
    channel.close()


def test_unsent_bytes_are_sent_by_later_flushes(pair: tuple[NonBlockingChannel, socket.socket]) -> None:
    channel, theirs = pair
    bodies = [bytes([number]) * LONGEST for number in range(16)]
    for body in bodies:
        channel.send(7, body)
    assert channel.events & select.POLLOUT, "the socket has accepted 16 MiB that were not read"
    other = NonBlockingChannel(theirs, LONGEST)
    found: list[tuple[int, bytes]] = []
    while len(found) < len(bodies):
        channel.flush()
        found += messages_of(other, 1)
    assert found == [(7, body) for body in bodies]
    assert channel.events == select.POLLIN


def test_messages_before_a_close_are_returned_first(pair: tuple[NonBlockingChannel, socket.socket]) -> None:
    channel, theirs = pair
    theirs.sendall(framed(1, b"last words") + b"\0")
    theirs.close()
    assert messages_of(channel, 1) == [(1, b"last words")]
    with pytest.raises(ConnectionError):
        channel.receive()


def test_too_long_message_is_refused_by_its_receiver(pair: tuple[NonBlockingChannel, socket.socket]) -> None:
    channel, theirs = pair
    theirs.sendall(struct.pack("<IB", LONGEST + 1, 0))
    with pytest.raises(WeightsError, match=rf"{LONGEST + 1} bytes; at most {LONGEST}"):
        messages_of(channel, 1)


def test_messages_sent_while_connecting_are_delivered() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        channel = NonBlockingChannel.dial(listener.getsockname(), LONGEST)
        channel.send(3, b"early")
        theirs, _ = listener.accept()
        with theirs:
            poller = select.poll()
            poller.register(channel, select.POLLOUT)
            assert poller.poll(WAIT_MS)
            channel.flush()
            assert theirs.recv(10, socket.MSG_WAITALL) == framed(3, b"early")
        channel.close()


def test_refused_connection_is_raised_by_the_next_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    channel = NonBlockingChannel.dial(address, LONGEST)
    poller = select.poll()
    poller.register(channel, select.POLLIN)
    assert poller.poll(WAIT_MS)
    with pytest.raises(OSError):
        channel.receive()
    channel.close()
    channel.close()


def test_unknown_host_is_refused() -> None:
    with pytest.raises(WeightsError, match=r"No connection to nowhere\.invalid:1"):
        NonBlockingChannel.dial(("nowhere.invalid", 1), LONGEST)
