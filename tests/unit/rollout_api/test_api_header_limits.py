"""Limit on the bytes of a request's headers, at a server whose limit on their time is longer than the test."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from starling.common.http.protocol import MAX_HEADER_BYTES, limited_protocol

DEADLINE_S = 60.0
WHOLE = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def answer(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answer every request with an empty body."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


@pytest.fixture
def port() -> Iterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    http = limited_protocol(100 * DEADLINE_S, 100 * DEADLINE_S)
    server = uvicorn.Server(uvicorn.Config(answer, http=http, lifespan="off", log_config=None))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def received(connection: socket.socket) -> bytes:
    """Return what the server sends until it closes the connection."""
    response = b""
    try:
        while part := connection.recv(4096):
            response += part
    except ConnectionError:
        pass  # it had not read all that was sent
    return response


@pytest.mark.parametrize(
    ("begin", "part"),
    [
        (b"GET /", b"a"),
        (b"GET / HTTP/1.1\r\nHost: ", b"a"),
        (b"GET / HTTP/1.1\r\n", b"Name: value\r\n"),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"Name: value\r\n"),
    ],
    ids=["first line", "one header", "many headers", "after the body"],
)
def test_connection_with_too_large_headers_is_closed(port: int, begin: bytes, part: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as connection:
        try:
            connection.sendall(begin + part * (4 * MAX_HEADER_BYTES // len(part)))
        except ConnectionError:
            pass
        received(connection)
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as connection:
        connection.sendall(WHOLE)
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_headers_below_the_limit_are_accepted(port: int) -> None:
    value = b"a" * (MAX_HEADER_BYTES // 2)
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as connection:
        for _ in range(3):  # the limit is one request's
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nName: " + value + b"\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
