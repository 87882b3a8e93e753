"""The NIXL transport: its known pitfalls, and untrusted input at both ends."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
from transport_peers import (
    ANSWER_S,
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
from starling.weightsync.memory.arena import PAGE_BYTES
from starling.weightsync.memory.arrays import allocate
from starling.weightsync.offers.offer import RankOffer
from starling.weightsync.plan.layout import ShardPiece
from starling.weightsync.transports.base import AnswerReceived, ConnectionLost, ReadTarget
from starling.weightsync.transports.endpoints import MAX_WAITING, split_address
from starling.weightsync.transports.messages import (
    REQUEST_BYTES,
    OpenSnapshot,
    ReadBoxes,
    Request,
    SourceAnswer,
    decode_answer,
    encode_message,
    with_checksum,
)
from starling.weightsync.transports.nixl import server as nixl_server
from starling.weightsync.transports.nixl.agent import SUPPORTED, NixlAgent, RemoteBlock
from starling.weightsync.transports.nixl.client import NixlClient
from starling.weightsync.transports.nixl.protocol import ANSWER, FETCHED, LOCATION, NUMBER, REQUEST, PayloadLocation
from starling.weightsync.transports.sockets.nonblocking import NonBlockingChannel

SIZE = 1 << 20
PIECE = piece("a", "uint8", (0, 1000))
WIDE = piece("w", "uint8", (0, 64), (0, 64))
PART = piece("w", "uint8", (0, 64), (0, 32))


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def test_missing_nixl_names_the_remedy() -> None:
    done = run_python(
        "import sys; sys.modules['nixl'] = None\n"
        "from starling.common.errors import WeightsError\n"
        "from starling.weightsync.transports.registry import serve\n"
        "from starling.weightsync.transports.source import SnapshotSource\n"
        "from starling.weightsync.memory.arena import Arena\n"
        "arena = Arena(())\n"
        "try: serve(SnapshotSource(arena, ()), 'nixl', '127.0.0.1')\n"
        "except WeightsError as error: print(error)\n"
        "arena.close()"
    )
    assert done.stdout.startswith("NIXL is not available (")
    assert "run pip install --no-deps nixl==1.5.1 nixl-cu13==1.5.1" in done.stdout
    assert done.stdout.strip().endswith("or choose transport 'ucx', 'tcp' or 'local'.")


@pytest.mark.parametrize("version", ["1.4.9", "1.6.0", "2.0", "0.10", "unknown"])
def test_unsupported_version_is_refused(version: str) -> None:
    with pytest.raises(WeightsError, match=rf"NIXL {version} is installed, expected >=1\.5, <1\.6"):
        SUPPORTED.check(version)
    SUPPORTED.check("1.5.1")


@needs_nixl
def test_nixl_is_found_beside_the_bindings_of_cuda() -> None:
    """UCXX brings cuda.bindings. NIXL takes its build for the CUDA of these, once the process has imported them."""
    done = run_python(
        "import cuda.bindings\n"
        "from starling.weightsync.transports.nixl.agent import load_nixl\n"
        "print(load_nixl().__name__)\n"
    )
    assert done.stdout.startswith("nixl_cu13."), done.stderr


@needs_nixl
def test_nixl_import_leaves_logging_alone() -> None:
    done = run_python(
        "import logging\n"
        "from starling.weightsync.transports.nixl.agent import NixlAgent\n"
        "agent = NixlAgent(host='127.0.0.1')\n"
        "print(logging.raiseExceptions, logging.getLogger('nixl').handlers)\n"
        "agent.close()"
    )
    assert done.stdout.strip() == "True []"


@needs_nixl
def test_agents_of_several_threads_leave_the_environment_alone() -> None:
    before = {name: value for name, value in os.environ.items() if name.startswith("UCX_")}
    with ThreadPoolExecutor(4) as pool:
        for agent in pool.map(lambda _: NixlAgent(host="127.0.0.1"), range(8)):
            agent.close()
    assert {name: value for name, value in os.environ.items() if name.startswith("UCX_")} == before


def listeners() -> set[str]:
    """Return the hosts on which this process listens, as the kernel writes them."""
    mine = {os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path)}
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table][1:]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine}


@needs_nixl
def test_loopback_agent_listens_on_loopback_only() -> None:
    before = listeners()
    agent = NixlAgent(host="127.0.0.1")
    assert listeners() - before <= {"0100007F"}
    agent.close()


# --- memory --------------------------------------------------------------------------------------------------------


class AgentPair:
    """AgentPair agents in one thread; the near one may read a block of the far one."""

    def __init__(self, size: int = SIZE) -> None:
        self.near, self.far = NixlAgent(host="127.0.0.1"), NixlAgent(host="127.0.0.1")
        self.source = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        self.far.register([self.source])
        self.name = self.near.add_remote(self.far.metadata())

    def read(self, target: np.ndarray, begin: int = 0) -> None:
        reading = self.near.read(self.name, [RemoteBlock(target, self.source.ctypes.data + begin)])
        end = time.monotonic() + ANSWER_S
        while not reading.done():
            assert time.monotonic() < end
            self.far.progress()
        reading.release()
        assert (target == self.source[begin : begin + target.nbytes]).all()

    def close(self) -> None:
        self.near.close()
        self.far.close()


@pytest.fixture
def two() -> Iterator[AgentPair]:
    made = AgentPair()
    yield made
    made.close()


@needs_nixl
def test_own_mapping_is_registered_once_until_freed(two: AgentPair) -> None:
    memory = allocate(SIZE)
    two.read(memory[:1000])
    first = two.near.generation
    two.read(memory[5000:9000], 70)
    two.read(memory)
    assert two.near.generation == first
    assert len(two.near._regions) == 1
    del memory
    gc.collect()
    two.read(allocate(4096))
    assert len(two.near._regions) == 1
    assert two.near.generation == first + 1


@needs_nixl
def test_other_memory_is_registered_per_read(two: AgentPair) -> None:
    """A part that stayed registered would hide the whole, and NIXL would refuse the read."""
    target = np.zeros(SIZE, np.uint8)
    before = len(two.near.metadata())
    two.read(target[4096:8192])
    two.read(target)
    two.read(target[5000:200_000], 1)
    assert len(two.near.metadata()) == before


@needs_nixl
@pytest.mark.parametrize("begin", [-4096, SIZE - 10, 1 << 40])
def test_unregistered_memory_cannot_be_read(two: AgentPair, begin: int) -> None:
    target = np.zeros(4096, np.uint8)
    with pytest.raises(WeightsError, match="NOT_FOUND"):
        two.near.read(two.name, [RemoteBlock(target, two.source.ctypes.data + begin)])
    assert not target.any()
    two.read(target)


@needs_nixl
def test_snapshot_tokens_cannot_be_read() -> None:
    with serving("nixl", [PIECE]) as made:
        agent = NixlAgent(host="127.0.0.1")
        name = agent.add_remote(made.server.agent.metadata())  # type: ignore[attr-defined]
        slot = made.arena.slots[0].ctypes.data
        agent.read(name, [RemoteBlock(allocate(1000), slot)]).release()
        with pytest.raises(WeightsError, match="NOT_FOUND"):
            agent.read(name, [RemoteBlock(allocate(PAGE_BYTES), slot - PAGE_BYTES)])
        agent.close()


@needs_nixl
def test_read_on_one_host_needs_no_progress_at_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the threshold that UCXX sets, the source would have to make progress."""
    monkeypatch.setenv("UCX_RNDV_THRESH", "8192")
    monkeypatch.delenv("UCX_MEM_MMAP_HOOK_MODE", raising=False)
    before = dict(os.environ)
    made = AgentPair()
    assert dict(os.environ) == before
    target = allocate(SIZE)
    made.read(target[:64])
    reading = made.near.read(made.name, [RemoteBlock(target, made.source.ctypes.data)])
    end = time.monotonic() + ANSWER_S
    while not reading.done():
        assert time.monotonic() < end
    reading.release()
    assert (target == made.source).all()
    made.close()


def _progress_after_fork(pipe: Any) -> None:
    try:
        _AGENTS[0].progress()
    except WeightsError as error:
        pipe.send(str(error))
    os._exit(0)


_AGENTS: list[NixlAgent] = []


@needs_nixl
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_use_after_fork_is_refused() -> None:
    _AGENTS.append(NixlAgent(host="127.0.0.1"))
    ours, theirs = mp.Pipe()
    child = mp.get_context("fork").Process(target=_progress_after_fork, args=(theirs,))
    child.start()
    assert ours.poll(ANSWER_S)
    assert "start processes by 'spawn'" in ours.recv()
    child.join(ANSWER_S)
    _AGENTS.pop().close()


def wait_until_read(made: Reader, name: str) -> None:
    """Wait until a source has sent the location of its payload, and the read has begun."""
    assert isinstance(made.client, NixlClient)
    end = time.monotonic() + ANSWER_S
    while not any(item.read for item in made.client._connections[name].sent.values()):
        assert time.monotonic() < end
        assert not made.client.poll(0.0)


@needs_nixl
@pytest.mark.system
def test_dropping_a_stopped_source_keeps_the_reads_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TCP the source's processor serves a read: a stopped source would serve it when it continues."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    size = 48 << 20
    wanted = piece("big", "uint8", (0, size))
    truth = content(wanted, (size,))
    with remote_source("nixl", [wanted]) as one, remote_source("nixl", [wanted]) as two, reader("nixl") as made:
        arrays = {name: np.zeros(size, np.uint8) for name in ("one", "two")}
        for name, source in (("one", one), ("two", two)):
            assert not made.connect(source.offer, name).reason
            made.client.ask(name, made.request([wanted]), read_target([arrays[name]]))
            wait_until_read(made, name)
            source.signal(signal.SIGSTOP)
        made.client.drop("one")
        kept = arrays["one"].copy()
        for source in (one, two):
            source.signal(signal.SIGCONT)
        event = made.event()
        assert isinstance(event, AnswerReceived)
        assert event.source == "two"
        assert (arrays["two"] == truth).all()
        assert (arrays["one"] == kept).all()
        assert not made.connect(one.offer, "one").reason
        assert not made.ask(made.request([wanted]), read_target([arrays["one"]]), "one").reason
        assert (arrays["one"] == truth).all()


# --- untrusted readers ---------------------------------------------------------------------------------------


class RawReader:
    """A reader that sends raw messages."""

    def __init__(self, offer: RankOffer) -> None:
        self.offer = offer
        self.channel = NonBlockingChannel.dial(split_address(offer.address), 1 << 20)
        self._received: list[tuple[int, bytes]] = []

    def send(self, request: Request) -> None:
        self.channel.send(REQUEST, encode_message(request))

    def open(self) -> None:
        self.send(opening(self.offer))
        assert not self.answer().reason

    def receive(self) -> tuple[int, bytes]:
        """Return the next message. Raises OSError when the source has closed the connection."""
        end = time.monotonic() + ANSWER_S
        while not self._received and time.monotonic() < end:
            poller = select.poll()
            poller.register(self.channel, self.channel.events)
            poller.poll(100)
            self.channel.flush()
            self._received += self.channel.receive()
        return self._received.pop(0)

    def answer(self) -> SourceAnswer:
        kind, body = self.receive()
        assert kind == ANSWER
        return decode_answer(body)

    def is_closed(self) -> bool:
        """Return whether the source closes the connection."""
        try:
            while True:
                self.receive()
        except OSError:
            return True


@contextmanager
def raw_reader(made: ServedSource) -> Iterator[RawReader]:
    one = RawReader(made.offer)
    yield one
    one.channel.close()


def read_of(*boxes: ShardPiece, number: int = 2) -> ReadBoxes:
    return ReadBoxes(number=number, tag=number, segments=(1,) * len(boxes), boxes=boxes, digests="full", salt=0)


def can_read(made: ServedSource) -> bool:
    with reader("nixl") as peer:
        answer = peer.connect(made.offer)
        _, arrays = peer.read([PIECE])
        return not answer.reason and arrays[0].tobytes() == content(PIECE, (1000,)).tobytes()


@pytest.fixture(scope="module")
def served() -> Iterator[ServedSource]:
    with serving("nixl", [PIECE, WIDE]) as made:
        yield made


@needs_nixl
def test_metadata_is_not_sent_before_the_token(served: ServedSource) -> None:
    with raw_reader(served) as one:
        one.send(read_of(PIECE))
        assert "ticket first" in one.answer().reason
        one.send(OpenSnapshot(number=3, snapshot=served.offer.snapshot, proof="0" * 32))
        assert "ticket" in one.answer().reason
        one.send(read_of(PIECE, number=4))
        assert "ticket first" in one.answer().reason
        one.open()
        one.send(read_of(PIECE, number=5))
        kind, body = one.receive()
        assert kind == LOCATION
        assert msgspec.msgpack.decode(body[8:], type=PayloadLocation).metadata


@needs_nixl
@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (0, b""),
        (ANSWER, encode_message(SourceAnswer(number=1))),
        (REQUEST, b"nonsense"),
        (REQUEST, b""),
        (FETCHED, b"\1"),
        (FETCHED, NUMBER.pack(77)),
    ],
)
def test_malformed_message_ends_the_connection(served: ServedSource, kind: int, body: bytes) -> None:
    with raw_reader(served) as one:
        one.open()
        one.channel.send(kind, body)
        assert one.is_closed()
    assert can_read(served)


@needs_nixl
def test_too_long_message_ends_the_connection(served: ServedSource) -> None:
    host, port = split_address(served.address)
    with socket.create_connection((host, port), timeout=20) as plain:
        plain.sendall(np.uint32(REQUEST_BYTES + 1).tobytes() + b"\1")
        assert plain.recv(1) == b""
    assert can_read(served)


@needs_nixl
def test_too_many_unfetched_requests_end_the_connection(served: ServedSource) -> None:
    with raw_reader(served) as one:
        one.open()
        for number in range(2, 3 + MAX_WAITING):
            one.send(read_of(PIECE, number=number))
        assert one.is_closed()
    with raw_reader(served) as one:
        one.open()
        for _ in range(2):
            one.send(read_of(PIECE))
        assert one.is_closed()
    assert can_read(served)


@needs_nixl
def test_reader_that_never_fetches_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_server, "FETCH_TIMEOUT_S", 0.05)
    with serving("nixl", [PIECE, WIDE]) as made, raw_reader(made) as one:
        one.open()
        one.send(read_of(PART))
        assert one.is_closed()


@needs_nixl
def test_packing_buffer_is_not_reused_before_it_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_server, "FIRST_PACKING_BYTES", 1)
    monkeypatch.setattr(nixl_server, "PACKING_BYTES", 1)
    with serving("nixl", [PIECE, WIDE]) as made, raw_reader(made) as one:
        one.open()
        one.send(read_of(piece("w", "uint8", (0, 3), (0, 3)), number=2))
        assert [one.receive()[0] for _ in range(2)] == [LOCATION, ANSWER]
        one.send(read_of(PART, number=3))
        for number in range(4, 54):  # only answers to other requests arrive, and no location
            one.send(read_of(piece("nowhere", "uint8", (0, 1)), number=number))
            assert one.answer().number == number
        one.channel.send(FETCHED, NUMBER.pack(2))
        kind, body = one.receive()
        assert (kind, msgspec.msgpack.decode(body[8:], type=PayloadLocation).number) == (LOCATION, 3)


@needs_nixl
def test_packing_buffer_is_awaited_and_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_server, "FIRST_PACKING_BYTES", 1)
    monkeypatch.setattr(nixl_server, "PACKING_BYTES", 1)
    with serving("nixl", [PIECE, WIDE]) as made, reader("nixl") as peer:
        assert not peer.connect(made.offer).reason
        wanted = [piece("w", "uint8", (0, rows), (1, 33)) for rows in (1, 64, 7, 64, 2, 33)]
        arrays = [np.zeros(each.box.size, np.uint8) for each in wanted]
        for each, array in zip(wanted, arrays, strict=True):
            peer.client.ask("source", peer.request([each]), read_target([array]))
        for _ in wanted:
            event = peer.event()
            assert isinstance(event, AnswerReceived)
            assert not event.answer.reason
        for each, array in zip(wanted, arrays, strict=True):
            assert array.tobytes() == np.ascontiguousarray(content(each, WIDE.box.size)).tobytes()


# --- untrusted sources ---------------------------------------------------------------------------------------


@contextmanager
def impostor(reply: Callable[[NonBlockingChannel], None]) -> Iterator[RankOffer]:
    """Run a source that grants the first request, and answers the second one by `reply`."""
    failures: list[BaseException] = []

    def run() -> None:
        connection, _ = listener.accept()
        channel = NonBlockingChannel(connection, REQUEST_BYTES)
        poller = select.poll()
        poller.register(channel, select.POLLIN)
        try:
            num = 0
            while poller.poll(ANSWER_S * 1000):
                for _ in channel.receive():
                    num += 1
                    if num == 1:
                        channel.send(ANSWER, encode_message(SourceAnswer(number=1)))
                    else:
                        reply(channel)
        except OSError:
            pass  # the reader has closed the connection
        except BaseException as error:  # noqa: BLE001 - to be raised in the test's own thread
            failures.append(error)
        channel.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=run)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        yield RankOffer(rank=0, transport="nixl", address=address, snapshot=1, holds="", root="")
        thread.join(ANSWER_S)
        assert not failures


def location(
    number: int = 2, size: int = 1000, address: int = 4096, metadata: bytes = b"", devices: tuple[int, ...] = ()
) -> bytes:
    place = PayloadLocation(number=number, metadata=metadata, segments=((address, size),), devices=devices)
    return with_checksum(msgspec.msgpack.encode(place))


@pytest.mark.sample(3)
@needs_nixl
@pytest.mark.parametrize(
    "reply",
    [
        lambda channel: channel.send(9, b""),
        lambda channel: channel.send(ANSWER, b"nonsense"),
        lambda channel: channel.send(ANSWER, encode_message(SourceAnswer(number=3))),
        lambda channel: channel.send(ANSWER, encode_message(SourceAnswer(number=2, digests=b"d" * 16))),
        lambda channel: channel.send(LOCATION, location()[8:]),
        lambda channel: channel.send(LOCATION, location(devices=(-1, -1))),
        lambda channel: channel.send(LOCATION, location(devices=(-2,))),
        lambda channel: channel.send(LOCATION, location(devices=(1 << 16,))),
        lambda channel: channel.send(LOCATION, location(devices=(7,))),
        lambda channel: channel.send(LOCATION, location(number=1)),
        lambda channel: channel.send(LOCATION, location(number=3)),
        lambda channel: channel.send(LOCATION, location(size=1001)),
        lambda channel: channel.send(LOCATION, location()),
        lambda channel: channel.send(LOCATION, location(metadata=b"nonsense")),
        lambda channel: channel.close(),
    ],
)
def test_source_that_violates_the_protocol_is_lost(reply: Callable[[NonBlockingChannel], None]) -> None:
    array = np.zeros(1000, np.uint8)
    with impostor(reply) as offer, reader("nixl") as peer:
        assert not peer.connect(offer).reason
        peer.client.ask("source", peer.request([PIECE]), read_target([array]))
        assert isinstance(peer.event(), ConnectionLost)
        assert peer.event(0.05) is None, "a loss is reported twice"
        peer.client.ask("source", OpenSnapshot(number=9, snapshot=1, proof=""), ReadTarget())
        peer.client.drop("source")
        assert peer.event(0.05) is None
    assert not array.any()


@needs_nixl
def test_corrupted_metadata_is_refused(two: AgentPair) -> None:
    true = two.far.metadata()
    for broken in (b"", b"x", true[: len(true) // 2], true[::-1], bytes(len(true))):
        with pytest.raises(WeightsError):
            two.near.add_remote(broken)
    two.read(np.zeros(100, np.uint8))


@needs_nixl
def test_one_client_reads_from_many_sources(served: ServedSource) -> None:
    with serving("nixl", [PIECE]) as other, reader("nixl") as peer:
        check_both(peer, served, other)


def check_both(peer: Reader, *sources: ServedSource) -> None:
    for index, made in enumerate(sources):
        assert not peer.connect(made.offer, f"source {index}").reason
    arrays = [np.zeros(1000, np.uint8) for _ in sources]
    for index, array in enumerate(arrays):
        peer.client.ask(f"source {index}", peer.request([PIECE]), read_target([array]))
    assert {event.source for event in (peer.event(), peer.event()) if event} == {"source 0", "source 1"}
    for array in arrays:
        assert array.tobytes() == content(PIECE, (1000,)).tobytes()
