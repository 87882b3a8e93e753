"""`served_model`: queries the endpoint directly, until it is complete."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from starling.cli.evaluate.harness import served_model

DEADLINE_S = 30.0
MODELS = {"data": [{"starling": {"version": 0, "max_model_len": 256}}]}


@contextmanager
def endpoint_with_reply(folder: Path, reply: bytes) -> Iterator[list[str]]:
    """Run an endpoint that gives the same reply to every request; yields the requests."""
    requests: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(DEADLINE_S)

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                requests.append(connection.recv(1 << 16).decode())
                connection.sendall(reply)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        (folder / "api").mkdir()
        address = {"base_url": f"http://127.0.0.1:{server.getsockname()[1]}/v1", "api_key": "k", "model": "m"}
        (folder / "api" / "rollout-0.json").write_text(json.dumps(address))
        yield requests
        thread.join(DEADLINE_S)


def test_served_model_bypasses_the_proxies_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # no server listens there
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    body = json.dumps(MODELS).encode()
    reply = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body
    with endpoint_with_reply(tmp_path, reply) as requests:
        served = served_model(tmp_path)
    assert served is not None
    assert (served["model"], served["max_model_len"]) == ("m", 256)
    assert requests[0].startswith("GET /v1/models ")
    assert "Bearer k" in requests[0]


@pytest.mark.parametrize(
    "reply",
    [
        b"",  # closed during the request
        b'HTTP/1.1 200 OK\r\ncontent-length: 99\r\nconnection: close\r\n\r\n{"data"',  # closed during its reply
        b"HTTP/1.1 503 no\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 65\r\nconnection: close\r\n\r\n"
        b'{"data": [{"starling": {"version": -1, "max_model_len": 256}}]}  ',
    ],
)
def test_served_model_is_none_until_it_is_served(tmp_path: Path, reply: bytes) -> None:
    assert served_model(tmp_path) is None, "no file yet"
    with endpoint_with_reply(tmp_path, reply):
        assert served_model(tmp_path) is None
