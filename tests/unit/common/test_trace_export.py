"""Ids of traces, and their export: bounded, dropped where the collector is dead, and never waited for."""

from __future__ import annotations

import gzip
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from pydantic import ValidationError

from starling.common.observe.tracing import exporter as exporting
from starling.common.observe.tracing.exporter import SpanExporter, SpanRecord, with_path
from starling.common.observe.tracing.ids import ROOT, is_sampled, span_id, trace_id
from starling.common.observe.tracing.traces import GroupTraces, open_traces
from starling.common.settings import TraceSettings


def test_ids_follow_from_run_and_prompt() -> None:
    assert trace_id("run", "train/0/1") == trace_id("run", "train/0/1")
    ids = {trace_id(run, prompt) for run in ("a", "ab") for prompt in ("c", "bc", "b/c", "")}
    assert len(ids) == 8, "another run or prompt is another trace, wherever one ends and the other begins"
    trace = trace_id("run", "train/0/1")
    assert 0 < trace < 1 << 128
    assert 0 < span_id(trace, ROOT) < 1 << 64
    assert span_id(trace, "step/1") != span_id(trace, "step/2")


def test_share_of_groups_is_sampled_alike_everywhere() -> None:
    traces = [trace_id("run", f"train/0/{row}") for row in range(4000)]
    kept = sum(is_sampled(trace, 0.25) for trace in traces)
    assert 800 < kept < 1200
    assert all(is_sampled(trace, 1.0) for trace in traces)
    assert not any(is_sampled(trace, 0.0) for trace in traces)


def test_traces_are_off_by_default_and_import_no_sdk() -> None:
    code = (
        "import sys\n"
        "from starling.common.observe.tracing.traces import open_traces\n"
        "from starling.common.settings import TraceSettings\n"
        "assert open_traces(TraceSettings(), 'run', 'policy', 'policy-0') is None\n"
        "assert not any(name.startswith('opentelemetry') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


@pytest.mark.parametrize(
    "endpoint", ["localhost:4318", "grpc://host:4317", "http://", "http://host:port", "http://me:secret@host:4318"]
)
def test_endpoint_that_is_no_address_is_refused(endpoint: str) -> None:
    with pytest.raises(ValidationError, match="http://HOST:4318"):
        TraceSettings(endpoint=endpoint)


def test_endpoint_without_a_path_gets_that_of_otlp() -> None:
    assert with_path("http://host:4318") == "http://host:4318/v1/traces"
    assert with_path("http://host:4318/") == "http://host:4318/v1/traces"
    assert with_path("https://host/otlp/v1/traces") == "https://host/otlp/v1/traces"


def test_hanging_collector_delays_nothing_and_its_spans_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector accepts connections and never answers."""
    monkeypatch.setattr(exporting, "EXPORT_S", 1.0)
    monkeypatch.setattr(exporting, "MAX_QUEUE", 16)
    with socket.create_server(("127.0.0.1", 0)) as server:
        exporter = SpanExporter(f"http://127.0.0.1:{server.getsockname()[1]}", "policy", "run", "policy-0")
        traces = GroupTraces(exporter.add, "run", 1.0, exporter.close)
        for number in range(200):
            traces.begin(f"work {number}", f"train/0/{number}")
            traces.end(f"work {number}", "generate")
        assert exporter.num_dropped >= 200 - 16 - exporting.MAX_BATCH
        deadline = time.monotonic() + 120
        while exporter.num_dropped < 200 - 16 and time.monotonic() < deadline:
            traces.add(1, "more", "more", 0, 1)
            time.sleep(0.05)
        assert exporter.num_dropped >= 16, "what the collector did not take, or the queue did not hold, is counted"
        traces.close()


def test_spans_arrive_with_their_ids_and_their_process() -> None:
    bodies: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            is_compressed = self.headers.get("Content-Encoding") == "gzip"
            bodies.append((self.path, gzip.decompress(body) if is_compressed else body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        exporter = SpanExporter(f"http://127.0.0.1:{server.server_port}", "policy", "run", "policy-0")
        traces = GroupTraces(exporter.add, "run", 1.0, lambda: exporter.close(120))
        trace = traces.trace("train/0/1")
        traces.add(trace, ROOT, "group", 10, 30, prompt="train/0/1")
        traces.add(trace, "step/1", "step", 20, 25, version=1, replayed=False)
        traces.close()
        server.shutdown()
        thread.join(60)
    assert [path for path, _ in bodies] == ["/v1/traces"]
    (resource,) = ExportTraceServiceRequest.FromString(bodies[0][1]).resource_spans
    names = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert names["service.name"] == "starling-policy"
    assert names["service.instance.id"] == "policy-0"
    assert names["starling.run"] == "run"
    group, step = resource.scope_spans[0].spans
    assert group.trace_id == step.trace_id == trace.to_bytes(16)
    assert group.span_id == step.parent_span_id == span_id(trace, ROOT).to_bytes(8)
    assert not group.parent_span_id
    assert (step.name, step.start_time_unix_nano, step.end_time_unix_nano) == ("step", 20, 25)


def test_span_that_never_began_is_not_exported() -> None:
    records: list[SpanRecord] = []
    traces = GroupTraces(records.append, "run", 1.0)
    traces.end("generate:t1:1.1", "generate")
    traces.begin("generate:t2:1.2", "train/0/2")
    traces.forget("generate:t2:1.2")
    traces.end("generate:t2:1.2", "generate")
    assert records == []
    traces.begin("generate:t3:1.3", "train/0/3")
    traces.end("generate:t3:1.3", "generate", replica="rollout-0")
    (record,) = records
    assert record.trace == trace_id("run", "train/0/3")
    assert record.parent == span_id(record.trace, ROOT)
    assert record.attributes == {"replica": "rollout-0"}


def test_sdk_that_is_not_installed_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(ValueError, match=r"install starling-common\[traces\], or leave it empty"):
        open_traces(TraceSettings(endpoint="http://127.0.0.1:9"), "run", "policy", "policy-0")
