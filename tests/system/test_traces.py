"""OpenTelemetry traces of a run: the spans of one group, of four processes, form one tree at a real OTLP receiver."""

from __future__ import annotations

import gzip
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from system_runs import make_workdir, run

pytestmark = pytest.mark.system


class Collector:
    """The spans that arrived, by trace."""

    def __init__(self) -> None:
        self.traces: dict[bytes, dict[bytes, tuple[str, Any]]] = defaultdict(dict)
        """By trace and span id: the service, and the span."""
        self.address = ""

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            names = {one.key: one.value.string_value for one in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.traces[span.trace_id][span.span_id] = (names["service.name"], span)

    def complete(self) -> list[dict[bytes, tuple[str, Any]]]:
        """Return the traces that reach from the prompt to an adoption."""
        wanted = {"group", "generate", "score", "wait in the buffer", "step", "publish", "adopt"}
        return [spans for spans in self.traces.values() if wanted <= {span.name for _, span in spans.values()}]


@contextmanager
def collector() -> Iterator[Collector]:
    """Receive OTLP over HTTP on a free port."""
    received = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.path == "/v1/traces"
            assert self.headers["Content-Type"] == "application/x-protobuf"
            received.take(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        received.address = f"http://127.0.0.1:{server.server_port}"
        try:
            yield received
        finally:
            server.shutdown()
            thread.join(10)


def test_spans_of_one_group_form_one_tree(tmp_path: Path) -> None:
    with collector() as received:
        short: dict[str, Any] = {"sft": {"num_steps": 1}, "rl": {"num_steps": 3}, "evaluation": {"at_end": False}}
        folder = make_workdir(tmp_path, observe={"traces": {"endpoint": received.address}}, **short)
        with run(folder) as command:
            assert command.wait() == 0, command.transcript()
    complete = received.complete()
    assert complete, {span.name for spans in received.traces.values() for _, span in spans.values()}
    for spans in complete:
        roots = [span for _, span in spans.values() if not span.parent_span_id]
        assert [root.name for root in roots] == ["group"]
        for service, span in spans.values():
            assert not span.parent_span_id or span.parent_span_id in spans, (service, span.name)
            assert span.start_time_unix_nano <= span.end_time_unix_nano
        by_name = {span.name: (service, span) for service, span in spans.values()}
        assert {name: service for name, (service, _) in by_name.items()} == {
            "group": "starling-controller",
            "generate": "starling-rollout",
            "score": "starling-reward",
            "wait in the buffer": "starling-controller",
            "step": "starling-policy",
            "publish": "starling-policy",
            "adopt": "starling-controller",
        }
        parents = {name: spans[span.parent_span_id][1].name for name, (_, span) in by_name.items() if name != "group"}
        assert parents["adopt"] == "publish"
        assert parents["publish"] == "step"
        assert {parents[name] for name in ("generate", "score", "wait in the buffer", "step")} == {"group"}
