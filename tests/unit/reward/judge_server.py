"""HTTP server with scripted answers, in place of somebody else's OpenAI-compatible API."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    """One response: the text of a chat completion, or a raw body."""

    text: str | None = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    delay_s: float = 0.0


Answer = Callable[[dict[str, Any], int], Reply]
"""From the body of a request, and how many came before, to the response."""


class JudgeServer:
    """The server, and what it was asked."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.encodings: list[str | None] = []
        self.most_at_a_time = self._num_now = 0
        self._lock = threading.Lock()
        self.url = ""

    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["content-length"])))
        with self._lock:
            number = len(self.requests)
            self.requests.append(body)
            self.keys.append(handler.headers.get("authorization"))
            self.encodings.append(handler.headers.get("accept-encoding"))
            self._num_now += 1
            self.most_at_a_time = max(self.most_at_a_time, self._num_now)
        reply = self.answer(body, number)
        time.sleep(reply.delay_s)
        with self._lock:
            self._num_now -= 1
        completion = {"choices": [{"index": 0, "message": {"role": "assistant", "content": reply.text}}]}
        data = json.dumps(completion).encode() if reply.body is None else reply.body
        handler.send_response(reply.status)
        for name, value in {**reply.headers, "content-length": str(len(data))}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(data)


@contextmanager
def judge_server(answer: Answer) -> Iterator[JudgeServer]:
    judge = JudgeServer(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            assert self.path == "/v1/chat/completions"
            try:
                judge.serve(self)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    judge.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield judge
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def shown(body: dict[str, Any], name: str) -> str:
    """Return what a question has between the tags of a name."""
    text: str = body["messages"][1]["content"]
    begin = text.index(f"<{name} ")
    return text[text.index(">\n", begin) + 2 : text.index(f"\n</{name} ")]
