"""Limit on the open connections of the HTTP server, and what clients without a key make it log."""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import uvicorn

from starling.common.http.protocol import MAX_PIPELINED, limited_protocol
from starling.rollout.api.model import ServedModel
from starling.rollout.api.server import ApiServer
from starling.rollout.engine.queue import EngineQueue
from starling.rollout.settings import ApiSettings

DEADLINE_S = 60.0
MOST = 4
REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class Held:
    """An application that answers `/held` when it is told to, in parts, and all else at once."""

    def __init__(self) -> None:
        self.begun, self.release = threading.Event(), threading.Event()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["path"] == "/held":
            import asyncio

            self.begun.set()
            await asyncio.to_thread(self.release.wait, DEADLINE_S)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(20):
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
                await asyncio.sleep(0.005)
            await send({"type": "http.response.body"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})


@pytest.fixture
def served() -> Iterator[tuple[int, Held]]:
    listener = socket.create_server(("127.0.0.1", 0))
    application = Held()
    http = limited_protocol(100 * DEADLINE_S, 100 * DEADLINE_S, MOST)
    server = uvicorn.Server(uvicorn.Config(application, http=http, lifespan="off", log_config=None))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    yield listener.getsockname()[1], application
    application.release.set()
    server.force_exit = server.should_exit = True
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)


def is_closed(connection: socket.socket) -> bool:
    """Wait for the server to close the connection, or to answer."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_connection_that_is_idle_for_longest_is_closed_for_a_new_one(served: tuple[int, Held]) -> None:
    port, application = served
    with ExitStack() as stack:
        held = stack.enter_context(connect(port))
        held.sendall(REQUEST.replace(b" / ", b" /held "))
        assert application.begun.wait(DEADLINE_S)
        idle = [stack.enter_context(connect(port)) for _ in range(3 * MOST)]
        assert all(is_closed(connection) for connection in idle[: -(MOST - 1)])
        idle[-1].sendall(REQUEST)
        assert idle[-1].recv(100).startswith(b"HTTP/1.1 200 ")
        application.release.set()
        assert held.recv(100).startswith(b"HTTP/1.1 200 ")


def test_requests_that_wait_for_the_one_before_are_bounded(served: tuple[int, Held]) -> None:
    """Each took 6 KiB of memory, and the server read on whenever it had answered one of them."""
    port, application = served
    with connect(port) as connection:
        connection.sendall(REQUEST.replace(b" / ", b" /held ") + MAX_PIPELINED * REQUEST)
        assert application.begun.wait(DEADLINE_S)
        application.release.set()
        read = b""
        while read.count(b"HTTP/1.1 200 ") <= MAX_PIPELINED:
            read += connection.recv(10_000)
    application.begun.clear(), application.release.clear()
    with connect(port) as connection:
        connection.sendall(REQUEST.replace(b" / ", b" /held ") + (MAX_PIPELINED + 1) * REQUEST)
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")
        while connection.recv(1000):
            pass


def test_end_of_a_connection_ends_the_request_that_others_wait_for(
    served: tuple[int, Held], caplog: pytest.LogCaptureFixture
) -> None:
    """Its answer was written to the closed connection: an exception, with a traceback in the log."""
    port, application = served
    with connect(port) as connection:
        connection.sendall(REQUEST.replace(b" / ", b" /held ") + REQUEST)
        assert application.begun.wait(DEADLINE_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with connect(port) as other:
        for _ in range(2):  # before and after the answer
            other.sendall(REQUEST)
            assert other.recv(1000).startswith(b"HTTP/1.1 200 ")
            application.release.set()
            time.sleep(0.5)
    assert not caplog.records


def test_invalid_requests_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Each took a line of the service's log, of anybody who reaches the port."""
    served = ServedModel("m", None, 16, 1, (), lambda: 0, 0, lambda text: (text, ()))
    server = ApiServer(EngineQueue(lambda: None), served, ApiSettings(), replica="rollout-0", folder=None)
    try:
        with caplog.at_level(logging.WARNING):
            for request in (b"\0\r\n\r\n", b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"):
                with connect(int(server.base_url.rpartition(":")[2].partition("/")[0])) as connection:
                    connection.sendall(request)
                    assert connection.recv(100).startswith(b"HTTP/1.1 40")
    finally:
        server.close()
    assert not caplog.records
