"""Encrypted weights: nothing readable on the wire, nothing changed unnoticed, no key used twice."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
from transport_peers import AnyTransport, content, piece, read_target, reader, serving

from starling.common.errors import WeightsError
from starling.weightsync.memory.arena import Arena
from starling.weightsync.offers.offer import RankOffer, make_offer
from starling.weightsync.offers.tickets import prove
from starling.weightsync.transports.base import ConnectionLost
from starling.weightsync.transports.endpoints import check_offered_transports, choose_transport, split_address
from starling.weightsync.transports.registry import serve
from starling.weightsync.transports.sockets.channel import Channel
from starling.weightsync.transports.sockets.records import (
    HEAD,
    RECORD_BYTES,
    TAG_BYTES,
    RecordReader,
    RecordWriter,
    channel_keys,
)
from starling.weightsync.transports.source import SnapshotSource

PIECE = piece("a", "uint8", (0, 3 << 20))


class Tap:
    """A proxy in front of a source that keeps what passes, and may change what the source sends."""

    def __init__(self, address: str, change: Callable[[int, bytes], bytes]) -> None:
        self.passed = {"from_reader": bytearray(), "from_source": bytearray()}
        self._target, self._change = split_address(address), change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._run)]
        self._threads[0].start()

    def _run(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(self._target)
        self._threads.append(threading.Thread(target=self._pass, args=(near, far, "from_reader")))
        self._threads[-1].start()
        self._pass(far, near, "from_source")

    def _pass(self, one: socket.socket, other: socket.socket, direction: str) -> None:
        try:
            while data := one.recv(1 << 16):
                seen = self.passed[direction]
                at = len(seen)
                seen += data
                other.sendall(self._change(at, data) if direction == "from_source" else data)
        except OSError:
            pass
        for end in (one, other):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self) -> None:
        self._listener.close()
        for thread in self._threads:
            thread.join(20)


def unchanged(at: int, data: bytes) -> bytes:
    return data


@contextmanager
def tapped(
    transport: AnyTransport, change: Callable[[int, bytes], bytes] = unchanged
) -> Iterator[tuple[RankOffer, Tap]]:
    """Serve through a proxy."""
    with serving(transport, [PIECE]) as made:
        tap = Tap(made.offer.address, change)
        try:
            yield msgspec.structs.replace(made.offer, address=tap.address), tap
        finally:
            tap.close()


@pytest.mark.parametrize(("transport", "readable"), [("tcp", True), ("tcp+aes", False)])
def test_only_encrypted_weights_cannot_be_read_on_the_way(transport: AnyTransport, readable: bool) -> None:
    truth = content(PIECE, PIECE.box.size).tobytes()
    with tapped(transport) as (offer, tap):
        with reader(transport) as peer:
            assert not peer.connect(offer).reason
            answer, (array,) = peer.read([PIECE])
            assert not answer.reason
            assert array.tobytes() == truth
            presented = bytes(tap.passed["from_reader"])
        samples = [truth[at : at + 32] for at in range(0, len(truth), 1 << 16)]
        assert all((sample in tap.passed["from_source"]) is readable for sample in samples)
        assert offer.secret.encode() not in presented
        assert (b"segments" in presented) is readable, "requests are encrypted, too"


def test_changed_record_is_a_lost_connection() -> None:
    def flip(at: int, data: bytes) -> bytes:
        where = (1 << 20) - at
        if not 0 <= where < len(data):
            return data
        return data[:where] + bytes([data[where] ^ 1]) + data[where + 1 :]

    with tapped("tcp+aes", flip) as (offer, _), reader("tcp+aes") as peer:
        assert not peer.connect(offer).reason
        array = np.zeros(PIECE.box.size, np.uint8)
        peer.client.ask("source", peer.request([PIECE]), read_target([array]))
        event = peer.event()
        assert isinstance(event, ConnectionLost)
        assert "encrypted record was changed" in event.reason


def test_each_opening_has_its_own_keys_in_each_direction() -> None:
    keys = [
        key
        for nonce in ("1", "2")
        for rank in range(2)
        for key in channel_keys(prove(offered("tcp", True, FAR), rank=rank, nonce=nonce))
    ]
    assert len(set(keys)) == 8
    assert all(len(key) == 32 for key in keys)


def test_reopened_connection_continues_under_new_keys() -> None:
    with serving("tcp+aes", [PIECE]) as made, reader("tcp+aes") as peer:
        offer = made.offer
        assert not peer.connect(offer).reason
        for _ in range(3):
            assert not peer.read([PIECE])[0].reason
            assert not peer.release().reason
            offer = made.publish()
            assert not peer.open(offer).reason
        assert peer.read([PIECE])[1][0].tobytes() == content(PIECE, PIECE.box.size).tobytes()


def record(writer: RecordWriter, text: bytes) -> bytes:
    return bytes(writer.write(memoryview(text)))


def read(made: RecordReader, data: bytes, size: int = 100) -> bytes:
    """Return the content of a record, received into memory of that size."""
    head, memory = data[: HEAD.size], memoryview(bytearray(size))
    made.body(head)[:] = data[HEAD.size :]
    num = made.read(head, memory)
    return bytes(memory[:num])


@pytest.mark.parametrize("order", [(1,), (0, 0), (0, 2)])
def test_records_out_of_order_do_not_decrypt(order: tuple[int, ...]) -> None:
    key = os.urandom(32)
    writer, made = RecordWriter(key), RecordReader(key)
    records = [record(writer, b"number %d" % index) for index in range(3)]
    for index in order[:-1]:
        assert read(made, records[index]) == b"number %d" % index
    with pytest.raises(WeightsError, match="is not the peer's"):
        read(made, records[order[-1]])


def test_equal_contents_have_different_records() -> None:
    writer = RecordWriter(os.urandom(32))
    assert len({record(writer, b"the same") for _ in range(100)}) == 100


def test_content_longer_than_the_wanted_memory_is_kept() -> None:
    key = os.urandom(32)
    writer, made = RecordWriter(key), RecordReader(key)
    assert read(made, record(writer, b"0123456789"), 4) == b""
    memory = memoryview(bytearray(4))
    taken = b""
    while num := made.take(memory):
        taken += bytes(memory[:num])
    assert taken == b"0123456789"


def test_longer_record_than_allowed_is_refused() -> None:
    made = RecordReader(os.urandom(32))
    assert made.body(HEAD.pack(RECORD_BYTES)).nbytes == RECORD_BYTES + TAG_BYTES
    with pytest.raises(WeightsError, match=f"at most {RECORD_BYTES} are allowed"):
        made.body(HEAD.pack(RECORD_BYTES + 1))


def test_blocks_of_any_size_pass_an_encrypted_channel() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    stop = threading.Event()
    here, there = Channel(one, stop), Channel(other, stop)
    here.encrypt(sending=b"a" * 32, receiving=b"b" * 32)
    there.encrypt(sending=b"b" * 32, receiving=b"a" * 32)
    sizes = (0, 1, 17, RECORD_BYTES - 1, RECORD_BYTES, RECORD_BYTES + 1, 3 * RECORD_BYTES + 5)
    blocks = [np.random.default_rng(size).integers(0, 256, size, np.uint8) for size in sizes]
    sending = threading.Thread(target=here.send, args=([block.data for block in blocks],))
    sending.start()
    wanted = np.concatenate(blocks)
    arrived = np.zeros_like(wanted)
    for begin in range(0, wanted.size, 700_001):
        there.receive(arrived[begin : begin + 700_001].data, None)
    sending.join(20)
    here.close()
    there.close()
    np.testing.assert_array_equal(arrived, wanted)


@pytest.mark.parametrize(
    ("choice", "host", "encrypt", "wanted"),
    [
        ("auto", "127.0.0.1", None, ("ucx", False)),
        ("auto", "127.0.0.1", True, ("ucx", False)),
        ("auto", "10.0.0.1", None, ("tcp", True)),
        ("auto", "10.0.0.1", False, ("tcp", False)),
        ("tcp", "10.0.0.1", None, ("tcp", True)),
        ("tcp", "127.0.0.1", True, ("tcp", False)),
        ("local", "10.0.0.1", True, ("local", False)),
        ("ucx", "10.0.0.1", None, ("ucx", False)),
        ("ucx", "127.0.0.1", True, ("ucx", False)),
    ],
)
def test_weights_between_hosts_are_encrypted_unless_stated_otherwise(
    choice: Any, host: str, encrypt: bool | None, wanted: tuple[str, bool]
) -> None:
    assert choose_transport(choice, host, encrypt=encrypt) == wanted


@pytest.mark.parametrize("choice", ["ucx", "nixl", "nccl", "gloo"])
def test_transport_that_cannot_encrypt_is_refused_between_hosts(choice: Any) -> None:
    with pytest.raises(WeightsError, match=f"Transport '{choice}' cannot encrypt weights.*10.0.0.1.*choose 'tcp'"):
        choose_transport(choice, "10.0.0.1", encrypt=True)


def test_source_that_cannot_encrypt_is_not_served() -> None:
    arena = Arena(())
    with pytest.raises(WeightsError, match="Transport 'gloo' cannot encrypt weights: choose 'tcp'"):
        serve(SnapshotSource(arena, ()), "gloo", "127.0.0.1", encrypted=True)
    arena.close()


def offered(transport: Any, encrypted: bool, host: str) -> RankOffer:
    return RankOffer(rank=0, transport=transport, address=f"{host}:9", secret="s", snapshot=1, holds="h",
                     root="0" * 32, encrypted=encrypted)  # fmt: skip


HERE, NEAR, FAR = "127.0.0.1", "10.0.0.1", "10.0.0.2"


@pytest.mark.parametrize(
    ("offer", "choice", "host", "encrypt"),
    [
        (offered("ucx", False, HERE), "auto", HERE, None),
        (offered("tcp", False, HERE), "auto", HERE, None),  # where UCX is not installed
        (offered("tcp", True, FAR), "auto", NEAR, None),
        (offered("tcp", True, FAR), "ucx", NEAR, None),
        (offered("tcp", False, FAR), "ucx", NEAR, None),
        (offered("tcp", False, FAR), "auto", NEAR, False),
        (offered("ucx", False, FAR), "ucx", NEAR, None),
        (offered("local", False, FAR), "auto", NEAR, True),
        (offered("nccl", False, FAR), None, NEAR, None),
        (offered("tcp", False, HERE), None, HERE, True),
        (offered("tcp", True, FAR), None, NEAR, True),
    ],
)
def test_reader_reads_what_its_settings_choose(offer: RankOffer, choice: Any, host: str, encrypt: bool | None) -> None:
    check_offered_transports(make_offer(1, [offer]), choice, host, encrypt=encrypt)


@pytest.mark.parametrize(
    ("offer", "choice", "host", "encrypt"),
    [
        (offered("ucx", False, FAR), "auto", NEAR, None),
        (offered("ucx", True, FAR), "auto", NEAR, None),  # it says so, and cannot
        (offered("ucx", False, FAR), "auto", HERE, None),
        (offered("ucx", False, HERE), "auto", NEAR, None),
        (offered("ucx", False, FAR), "tcp", NEAR, False),
        (offered("gloo", False, HERE), "auto", HERE, None),
        (offered("tcp", False, FAR), "auto", NEAR, None),
        (offered("tcp", False, FAR), None, NEAR, True),
        (offered("ucx", False, FAR), None, NEAR, True),
    ],
)
def test_offer_does_not_choose_what_its_reader_opens(
    offer: RankOffer, choice: Any, host: str, encrypt: bool | None
) -> None:
    with pytest.raises(WeightsError, match=r"does not allow at|cannot encrypt"):
        check_offered_transports(make_offer(1, [offer]), choice, host, encrypt=encrypt)
