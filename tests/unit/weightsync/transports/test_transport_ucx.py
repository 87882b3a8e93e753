"""The UCX transport: known pitfalls, each of which once lost data, time or a process."""

from __future__ import annotations

import multiprocessing as mp
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transport_peers import opening, piece, read_target, reader, serving

from starling.common.errors import WeightsError
from starling.weightsync.transports.base import ConnectionLost
from starling.weightsync.transports.endpoints import is_loopback
from starling.weightsync.transports.source import NoDeltas
from starling.weightsync.transports.ucx import worker
from starling.weightsync.transports.ucx.worker import SUPPORTED, UcxRequest, UcxWorker, has_ucx

pytestmark = pytest.mark.skipif(not has_ucx(), reason="UCXX is not installed")
WAIT_S = 20.0


class WorkerPair:
    """Two workers in one thread, with an endpoint at each end."""

    def __init__(self) -> None:
        self.near, self.far = UcxWorker(host="127.0.0.1"), UcxWorker(host="127.0.0.1")
        self.ours, self.theirs = self.near.connect(self.far.address), self.far.connect(self.near.address)
        received = self.far.receive(self.theirs, flat(8), 1)  # UCX connects when it first sends
        self.wait(self.near.send(self.ours, flat(8), 1), received)

    def step(self) -> None:
        self.near.progress(0.001)
        self.far.progress(0.001)

    def wait(self, *items: UcxRequest) -> None:
        end = time.monotonic() + WAIT_S
        while not all(item.completed for item in items) and time.monotonic() < end:
            self.step()
        assert all(item.completed for item in items)

    def close(self) -> None:
        self.near.hang_up(self.ours)
        self.far.hang_up(self.theirs)
        self.ours = self.theirs = None
        self.near.close()
        self.far.close()


@pytest.fixture
def pair() -> Iterator[WorkerPair]:
    made = WorkerPair()
    yield made
    made.close()


def flat(size: int, value: int = 0) -> np.ndarray:
    return np.full(size, value, np.uint8)


def test_lanes_on_one_host_are_cma_and_tcp(pair: WorkerPair) -> None:
    lanes = pair.near.lanes(pair.ours)
    assert "cma/memory" in lanes
    assert not any(lane.startswith(("posix/", "sysv/")) for lane in lanes)


def test_reader_that_drops_a_read_gives_its_lease_back() -> None:
    """UCX does not tell a source that a reader has closed its endpoint, not even one that it still sends to."""
    wanted = piece("a", "uint8", (0, 16 << 20))
    with serving("ucx", [wanted]) as made, reader("ucx") as leaving, reader("ucx") as staying:
        assert not leaving.connect(made.offer).reason
        assert not staying.connect(made.publish()).reason
        leaving.client.ask("source", leaving.request([wanted]), read_target([flat(16 << 20)]))
        leaving.client.drop("source")
        made.arena.claim(WAIT_S, "wait")  # raises while both snapshots are leased
        assert not made.arena.is_readable(made.offer.snapshot)


def test_memory_is_held_until_completion(pair: WorkerPair) -> None:
    target = flat(4 << 20)
    pair.far.receive(pair.theirs, target, 5)  # its request is dropped at once
    sent = pair.near.send(pair.ours, flat(4 << 20, 7), 5)
    assert len(pair.far._pending) == 1
    pair.wait(sent)
    end = time.monotonic() + WAIT_S
    while pair.far._pending and time.monotonic() < end:
        pair.step()
    assert not pair.far._pending
    assert (target == 7).all()


@pytest.mark.parametrize(
    ("memory", "sentence"),
    [
        (np.zeros((4, 4), np.uint8), "UCX moves flat bytes"),
        (np.zeros(16, np.uint8)[::2], "UCX moves flat bytes"),
        (np.zeros(16, np.uint16), "UCX moves flat bytes"),
        (np.frombuffer(b"constant", np.uint8), "read-only memory"),
    ],
)
def test_memory_that_is_not_flat_and_writable_is_refused(pair: WorkerPair, memory: np.ndarray, sentence: str) -> None:
    with pytest.raises(WeightsError, match=sentence):
        pair.near.receive(pair.ours, memory, 1)


def test_too_small_buffer_is_an_error_and_the_endpoint_survives(pair: WorkerPair) -> None:
    small = flat(100)
    received = pair.far.receive(pair.theirs, small, 2)
    pair.wait(pair.near.send(pair.ours, flat(200, 1), 2), received)
    with pytest.raises(pair.far.error, match="truncated"):
        received.check()
    assert not small.any()
    received = pair.far.receive(pair.theirs, small, 3)
    pair.wait(pair.near.send(pair.ours, flat(100, 9), 3), received)
    received.check()
    assert (small == 9).all()


def test_payload_longer_than_its_buffer_is_detected() -> None:
    wanted = piece("a", "uint8", (0, 5000))
    with serving("ucx", [wanted]) as made, reader("ucx") as peer:
        peer.connect(made.offer)
        peer.client.ask("source", peer.request([wanted]), read_target([flat(100)]))
        event = peer.event()
        assert isinstance(event, ConnectionLost)
        assert "truncated" in event.reason


def test_forced_close_ends_pending_receives(pair: WorkerPair) -> None:
    waiting = [pair.near.receive(pair.ours, flat(64), tag) for tag in range(10, 20)]
    pair.near.hang_up(pair.ours)
    pair.wait(*waiting)
    for item in waiting:
        with pytest.raises(pair.near.error, match=r"[Cc]ancel"):
            item.check()


def test_wake_ends_a_wait(pair: WorkerPair) -> None:
    for _ in range(20):
        pair.step()
    pair.near.wake()
    begin = time.monotonic()
    assert pair.near.progress(WAIT_S)
    assert time.monotonic() - begin < WAIT_S - 1.0, "the wakeup ended the wait early"


def test_close_with_pending_operations_returns(pair: WorkerPair) -> None:
    for tag in range(50):
        pair.near.receive(pair.ours, flat(1 << 16), tag)
        pair.far.send(pair.theirs, flat(1 << 16), 1000 + tag)


class _Failing(NoDeltas):
    """An event that ends the serving thread when it is read, but not before it may."""

    def __init__(self) -> None:
        self.asked, self.may_fail = threading.Event(), threading.Event()

    def bases(self, snapshot: int) -> tuple[int, ...]:
        self.asked.set()
        self.may_fail.wait(WAIT_S)
        raise SystemExit  # an Exception would end its connection only


def _close_while_a_reader_connects() -> None:
    wanted = piece("a", "uint8", (0, 1000))
    with serving("ucx", [wanted]) as made, reader("ucx") as known, reader("ucx") as asking, reader("ucx") as calling:
        assert not known.connect(made.offer).reason
        failing = made.source.deltas = _Failing()
        asking.client.connect("source", made.offer)
        asking.client.ask("source", opening(made.offer), read_target([]))
        end = time.monotonic() + WAIT_S
        while not failing.asked.is_set() and time.monotonic() < end:
            asking.client.poll(0.01)
        calling.client.connect("source", made.offer)
        for _ in range(200):  # until its connection waits at the source
            calling.client.poll(0.001)
        failing.may_fail.set()
        assert isinstance(known.event(), ConnectionLost)
        assert isinstance(asking.event(), ConnectionLost)
        assert isinstance(calling.event(), ConnectionLost)


def test_connecting_to_a_closing_source_fails_and_aborts_no_process() -> None:
    """UCX may call a listener back while one of its connections is not freed, even after the listener was freed."""
    process = mp.get_context("spawn").Process(target=_close_while_a_reader_connects)
    process.start()
    process.join(5 * WAIT_S)
    code = process.exitcode
    process.kill()
    assert code == 0


def _progress_after_fork(pipe: Any) -> None:
    try:
        _LINKS[0].progress(0.0)
    except WeightsError as error:
        pipe.send(str(error))
    os._exit(0)


_LINKS: list[UcxWorker] = []


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_use_after_fork_is_refused() -> None:
    _LINKS.append(UcxWorker(host="127.0.0.1"))
    ours, theirs = mp.Pipe()
    child = mp.get_context("fork").Process(target=_progress_after_fork, args=(theirs,))
    child.start()
    assert ours.poll(WAIT_S)
    assert "start processes by 'spawn'" in ours.recv()
    child.join(WAIT_S)
    _LINKS.pop().close()


@pytest.mark.parametrize("version", ["0.51.3", "0.53.0", "1.0", "0.45.00", "unknown"])
def test_unsupported_version_is_refused(version: str) -> None:
    with pytest.raises(WeightsError, match=rf"UCXX {version} is installed, expected >=0\.52, <0\.53"):
        SUPPORTED.check(version)
    SUPPORTED.check("0.52.00")


def test_missing_ucxx_falls_back_to_sockets_with_a_warning() -> None:
    code = (
        "import sys, logging; sys.modules['ucxx'] = None; logging.basicConfig()\n"
        "from starling.weightsync.transports.registry import serve\n"
        "from starling.weightsync.transports.source import SnapshotSource\n"
        "from starling.weightsync.memory.arena import Arena\n"
        "arena = Arena(()); serving = serve(SnapshotSource(arena, ()), 'ucx', '127.0.0.1')\n"
        "print(serving.transport); serving.server.close(5.0); arena.close()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "tcp"
    assert "over plain sockets, several times slower: UCX is not available" in done.stderr


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.4.5", "::1", "localhost"])
def test_loopback_addresses_are_recognised(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["10.0.0.1", "example", ""])
def test_other_addresses_are_not_loopback(host: str) -> None:
    assert not is_loopback(host)


def test_connection_made_again_at_once_is_served() -> None:
    """The source answers to the first connection after it was dropped: that answer is not taken for the second's."""
    wanted = piece("a", "uint8", (0, 1000))
    with serving("ucx", [wanted]) as made, reader("ucx") as peer:
        for _ in range(20):
            peer.client.connect("source", made.offer)
            peer.client.poll(0)
            for _ in range(50):  # what the source sends arrives, and nobody looks at it
                peer.client._worker.progress(0.001)  # type: ignore[attr-defined]
            peer.client.drop("source")
            assert not peer.connect(made.offer).reason
            peer.client.drop("source")


def test_library_is_not_loaded_ahead_of_one_that_the_host_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "LOADER_CACHE", tmp_path / "cache")
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{tmp_path}")
    monkeypatch.delenv("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY", raising=False)
    assert not worker._host_has_library()
    (tmp_path / "cache").write_bytes(b"\0libucp.so.0\0libucs.so.0\0/opt/ucx/lib/libucs.so.0\0")
    assert worker._host_has_library()
    (tmp_path / "cache").unlink()
    (tmp_path / "libucs.so.0").touch()
    assert worker._host_has_library()
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert not worker._host_has_library()
    monkeypatch.setenv("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY", "true")
    assert worker._host_has_library()
