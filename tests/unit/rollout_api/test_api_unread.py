"""Clients that do not read what they have asked for."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from starling.common.http.protocol import limited_protocol

DEADLINE_S = 60.0
PART = bytes(1 << 20)
NUM_PARTS = 64


class Answering:
    """An application that streams 64 MiB, or sends them at once, and reports the end of each of its tasks."""

    def __init__(self) -> None:
        self.has_ended = threading.Event()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        try:
            parts = [PART] * NUM_PARTS if scope["path"] == "/stream" else [PART * NUM_PARTS]
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for part in parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body"})
        finally:
            self.has_ended.set()


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[tuple[int, Answering, uvicorn.Server]]:
    listener = socket.create_server(("127.0.0.1", 0))
    application = Answering()
    http = limited_protocol(100 * DEADLINE_S, request.param)
    server = uvicorn.Server(uvicorn.Config(application, http=http, lifespan="off", log_config=None))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    yield listener.getsockname()[1], application, server
    server.force_exit = server.should_exit = True
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def ask(port: int, path: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    return connection


def read_all(connection: socket.socket) -> int:
    """Return how many bytes arrive until the server ends the connection."""
    total = 0
    try:
        while part := connection.recv(1 << 20):
            total += len(part)
    except ConnectionResetError:
        pass
    return total


@pytest.mark.parametrize("served", [0.2], indirect=True, ids=["short"])
@pytest.mark.parametrize("path", ["/stream", "/at-once"])
def test_response_of_which_nothing_is_read_ends(served: tuple[int, Answering, uvicorn.Server], path: str) -> None:
    port, application, server = served
    with ask(port, path) as connection:
        assert application.has_ended.wait(DEADLINE_S), "the task waits for the client for ever"
        until = time.monotonic() + DEADLINE_S
        while server.server_state.connections:
            assert time.monotonic() < until, "the connection stays"
        assert read_all(connection) < NUM_PARTS * len(PART)


@pytest.mark.parametrize("served", [100 * DEADLINE_S], indirect=True, ids=["long"])
@pytest.mark.parametrize("path", ["/stream", "/at-once"])
def test_response_that_is_read_is_whole(served: tuple[int, Answering, uvicorn.Server], path: str) -> None:
    port, _, _ = served
    with ask(port, path) as connection:
        assert read_all(connection) > NUM_PARTS * len(PART)
