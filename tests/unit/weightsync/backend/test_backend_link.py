"""The connection between workers of vLLM and their trainer: its secret, and what strangers can do."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from starling.common.errors import WeightsError
from starling.weightsync.transports.endpoints import split_address
from starling.weightsync.transports.messages import LENGTH
from starling.weightsync.vllm.backend import rendezvous as backend_rendezvous
from starling.weightsync.vllm.backend.link import HANDSHAKE_S, Link, new_secret
from starling.weightsync.vllm.backend.messages import (
    PROTOCOL,
    Hello,
    Opening,
    Welcome,
    encode,
    from_trainer,
    from_worker,
)
from starling.weightsync.vllm.backend.rendezvous import Rendezvous

DEADLINE_S = 30.0


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    made = Rendezvous("127.0.0.1")
    yield made
    made.close()


def test_messages_pass_both_ways_and_are_not_readable() -> None:
    seen = bytearray()
    secret = new_secret()
    trainer, relay = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))

    def forward(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                seen.extend(data)
                target.sendall(data)

    def serve() -> None:
        client, _ = relay.accept()
        onward = socket.create_connection(trainer.getsockname())
        threading.Thread(target=forward, args=(client, onward), daemon=True).start()
        forward(onward, client)

    threading.Thread(target=serve, daemon=True).start()
    accepted: list[Link] = []
    accepting = threading.Thread(target=lambda: accepted.append(Link.accept(trainer.accept()[0], secret)), daemon=True)
    accepting.start()
    worker = Link.dial(f"127.0.0.1:{relay.getsockname()[1]}", secret, DEADLINE_S)
    accepting.join(DEADLINE_S)
    worker.send(Hello(name="a name nobody reads", vllm="0"))
    assert accepted[0].receive(from_worker, DEADLINE_S).name == "a name nobody reads"
    accepted[0].send(Welcome(refused="no"))
    assert worker.receive(from_trainer, DEADLINE_S).refused == "no"
    assert b"nobody" not in seen
    assert secret.encode() not in seen
    worker.close()
    accepted[0].close()
    trainer.close()
    relay.close()


def test_worker_with_another_secret_is_not_taken(rendezvous: Rendezvous) -> None:
    with pytest.raises(WeightsError, match="does not know the secret of init_info"):
        Link.dial(rendezvous.address, new_secret(), DEADLINE_S)
    assert rendezvous.workers == []


def test_proof_of_any_characters_is_refused(rendezvous: Rendezvous, caplog: pytest.LogCaptureFixture) -> None:
    """Characters beyond ASCII ended the connection's thread with a traceback."""
    with socket.create_connection(split_address(rendezvous.address)) as stranger:
        for proof in ("", "é"):
            data = encode(Opening(protocol=PROTOCOL, nonce="n", proof=proof))
            stranger.sendall(LENGTH.pack(len(data)) + data)
        end = time.monotonic() + DEADLINE_S
        while "A peer does not know the secret of this trainer." not in caplog.text:
            assert time.monotonic() < end, caplog.text
            time.sleep(0.01)


def test_trainer_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(WeightsError, match=f"the trainer at 127.0.0.1:{port} cannot be reached: "):
        Link.dial(f"127.0.0.1:{port}", new_secret(), DEADLINE_S)


@pytest.mark.parametrize("garbage", [b"", b"\x00\x00\x00\x00", b"\xff" * 64, b"GET / HTTP/1.1\r\n\r\n"])
def test_garbage_is_dropped_and_others_are_served(rendezvous: Rendezvous, garbage: bytes) -> None:
    with socket.create_connection(split_address(rendezvous.address)) as stranger:
        stranger.sendall(garbage)
        with suppress(OSError):  # it may be cut off already
            stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(DEADLINE_S)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    link = Link.dial(rendezvous.address, rendezvous.secret, DEADLINE_S)
    link.send(Hello(name="worker 0", vllm="vllm 0.32.0", problem="no memory."))
    assert link.receive(from_trainer, DEADLINE_S).refused == "no memory."
    assert rendezvous.take_problems() == ["worker 0 cannot join: no memory."]
    link.close()


def test_strangers_do_not_fill_the_log(
    rendezvous: Rendezvous, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_rendezvous, "MAX_LOGGED", 2)
    for _ in range(5):
        with socket.create_connection(split_address(rendezvous.address)) as stranger:
            stranger.settimeout(DEADLINE_S)
            stranger.sendall(b"\xff" * 64)
            with suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
    rendezvous.close()
    assert caplog.text.count("a worker could not join") <= 2


def test_close_ends_connections_without_a_proof() -> None:
    made = Rendezvous("127.0.0.1")
    with socket.create_connection(split_address(made.address)) as stranger:
        stranger.settimeout(HANDSHAKE_S / 2)  # after HANDSHAKE_S they end by themselves
        end = time.monotonic() + DEADLINE_S
        while not made._opening:
            assert time.monotonic() < end, "the connection is not accepted"
        made.close()
        with suppress(ConnectionResetError):
            while stranger.recv(1 << 12):
                pass


def test_layout_that_is_none_is_refused(rendezvous: Rendezvous) -> None:
    link = Link.dial(rendezvous.address, rendezvous.secret, DEADLINE_S)
    link.send(Hello(name="worker 0", vllm="vllm 0.32.0", layout=b"none"))
    assert link.receive(from_trainer, DEADLINE_S).refused
    assert rendezvous.next_event(time.monotonic()) is None
    link.close()


STRANGERS = """
import socket, sys
host, port, num = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
connections = [socket.create_connection((host, port)) for _ in range(num)]
print("connected", flush=True)
sys.stdin.read()
"""


def test_strangers_take_neither_the_files_of_a_trainer_nor_the_place_of_a_worker(rendezvous: Rendezvous) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 150 + max(map(int, os.listdir("/proc/self/fd")))
    pipe = subprocess.PIPE
    arguments = [sys.executable, "-c", STRANGERS, *map(str, split_address(rendezvous.address)), str(most + 50)]
    with subprocess.Popen(arguments, stdin=pipe, stdout=pipe, text=True) as strangers:
        assert strangers.stdin is not None
        assert strangers.stdout is not None
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
        try:
            assert strangers.stdout.readline()
            for _ in range(20):  # until all are accepted
                with open(os.devnull, "rb"):
                    time.sleep(0.05)
            link = Link.dial(rendezvous.address, rendezvous.secret, DEADLINE_S)
            link.close()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            strangers.stdin.close()
