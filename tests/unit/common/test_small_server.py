"""The small HTTP server, by real sockets: answers, wrong requests, and clients that would hurt the process."""

from __future__ import annotations

import http.client
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from starling.common.errors import ConfigError
from starling.common.http import small
from starling.common.http.small import SmallRequest, SmallResponse, SmallServer

PATIENCE_S = 60.0


def answer(request: SmallRequest) -> SmallResponse:
    if request.path == "/large":
        return SmallResponse(200, b"x" * (8 << 20))
    if request.path == "/broken":
        raise KeyError("a bug")
    return SmallResponse(200, f"{request.path} {request.authorization}".encode())


@pytest.fixture
def server() -> Iterator[SmallServer]:
    one = SmallServer("127.0.0.1", 0, answer, "observe.http")
    one.start()
    yield one
    one.close()


def connect(server: SmallServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), PATIENCE_S)


def exchange(server: SmallServer, data: bytes) -> bytes:
    """Send bytes, and return all that comes until the server ends the connection."""
    with connect(server) as one:
        one.sendall(data)
        return read_all(one)


def read_all(one: socket.socket) -> bytes:
    found = bytearray()
    try:
        while data := one.recv(1 << 16):
            found += data
    except ConnectionResetError:
        pass
    return bytes(found)


def asked(server: SmallServer, path: str = "/x", method: str = "GET") -> tuple[int, bytes]:
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    client.request(method, path, headers={"Authorization": "Bearer t"})
    response = client.getresponse()
    return response.status, response.read()


def test_server_answers_get_and_head_with_path_and_token(server: SmallServer) -> None:
    assert asked(server, "/x?y=1") == (200, b"/x Bearer t")
    assert asked(server, "/x", "HEAD") == (200, b"")


def test_server_sends_an_answer_larger_than_the_buffers_of_the_kernel(server: SmallServer) -> None:
    assert asked(server, "/large") == (200, b"x" * (8 << 20))


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"POST / HTTP/1.1\r\n\r\n", b"405"),
        (b"GET / HTTP/2.0\r\n\r\n", b"400"),
        (b"GET http://other/ HTTP/1.1\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x00\xff\x00\r\n\r\n", b"400"),
        (b"\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nX: " + b"y" * 100_000, b"431"),
        (b"GET /" + b"y" * 100_000, b"431"),
    ],
)
def test_server_refuses_what_is_no_small_request(server: SmallServer, data: bytes, status: bytes) -> None:
    # What it sends may be lost when it closes a connection on which more has arrived.
    assert exchange(server, data).split(b" ")[1:2] in ([status], [])
    assert asked(server)[0] == 200


def test_server_answers_while_others_send_slowly_or_nothing(
    server: SmallServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small, "CONNECTION_S", 3600.0)
    slow = [connect(server) for _ in range(20)]
    for one in slow[::2]:
        one.sendall(b"GET / HT")
    assert asked(server)[0] == 200
    for one in slow:
        one.close()


def test_server_ends_a_connection_that_lasts_too_long(server: SmallServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small, "CONNECTION_S", 0.2)
    assert exchange(server, b"GET / HTTP/1.1\r\n") == b""


def test_server_ends_a_request_that_comes_in_many_pieces(server: SmallServer) -> None:
    with connect(server) as one:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end = time.monotonic() + PATIENCE_S
        try:
            while time.monotonic() < end:
                one.sendall(b"G")
                time.sleep(0.001)
        except OSError:
            pass
        assert time.monotonic() < end
    assert asked(server)[0] == 200


def test_server_ends_a_client_that_does_not_read(server: SmallServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small, "CONNECTION_S", 0.5)
    with connect(server) as one:
        one.sendall(b"GET /large HTTP/1.1\r\n\r\n")
        time.sleep(1.0)
        assert len(read_all(one)) < 8 << 20


def test_server_closes_the_oldest_connection_for_a_new_one(
    server: SmallServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(small, "CONNECTION_S", 3600.0)
    held = [connect(server) for _ in range(4)]
    assert asked(server)[0] == 200
    assert read_all(held[0]) == b""
    for one in held:
        one.close()


def test_server_accepts_a_flood_at_a_limited_rate(server: SmallServer) -> None:
    """Connections beyond the rate wait in the kernel: the process has few descriptors of them at any time."""
    before, most = len(os.listdir("/proc/self/fd")), 0
    num_sent = 3 * small.BURST
    clients = []
    for _ in range(num_sent):
        one = socket.socket()
        one.setblocking(False)
        one.connect_ex(("127.0.0.1", server.port))
        clients.append(one)
        most = max(most, len(os.listdir("/proc/self/fd")) - before - len(clients))
    assert most <= small.MAX_CONNECTIONS + 2
    for one in clients:
        one.close()
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        try:
            assert asked(server)[0] == 200
            return
        except (OSError, http.client.HTTPException):
            time.sleep(0.1)
    raise AssertionError("it does not answer after the flood")


def test_server_survives_connections_that_are_closed_at_once(server: SmallServer) -> None:
    for _ in range(50):
        one = connect(server)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # a reset
        one.close()
    assert asked(server)[0] == 200


def test_forked_process_does_not_hold_the_port(server: SmallServer) -> None:
    reader, writer = os.pipe()
    forked, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writer)
        os.write(told, b"x")
        os.read(reader, 1)
        os._exit(0)
    try:
        os.read(forked, 1)  # it has closed its copy of the socket
        port = server.port
        server.close()
        again = SmallServer("127.0.0.1", port, answer, "observe.http")
        again.close()
    finally:
        os.close(writer)
        os.waitpid(pid, 0)
        for descriptor in (reader, forked, told):
            os.close(descriptor)


def test_close_ends_the_thread_and_open_connections() -> None:
    one = SmallServer("127.0.0.1", 0, answer, "observe.http")
    one.start()
    with connect(one) as client:
        assert asked(one)[0] == 200
        one.close()
        assert read_all(client) == b""
    assert not any(thread.name == "endpoint" for thread in threading.enumerate())


def test_address_that_is_taken_is_an_error(server: SmallServer) -> None:
    with pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1:{server.port} \(.*\); change observe.http"):
        SmallServer("127.0.0.1", server.port, answer, "observe.http")


def test_an_answer_that_fails_ends_its_request_only(server: SmallServer) -> None:
    assert exchange(server, b"GET /broken HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 500 Internal Server Error\r\n")
    assert exchange(server, b"GET /path HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 200 OK\r\n")
