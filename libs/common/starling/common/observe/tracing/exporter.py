"""Export of spans to an OpenTelemetry collector over OTLP/HTTP, in a thread of its own.

Nothing waits for the collector: a span goes into a bounded queue, or is dropped and counted when that is full. The
thread sends what is there in batches; what a collector does not take within the time limit is lost.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit, urlunsplit

import structlog

from starling.common.errors import ConfigError

log = structlog.get_logger(__name__)

MAX_QUEUE: Final = 4096
"""Spans that wait for the collector."""
MAX_BATCH: Final = 512
BATCH_S: Final = 1.0
"""How long a span waits at most for others of its batch."""
EXPORT_S: Final = 30.0
"""Time limit of one request to the collector."""
CLOSE_S: Final = 3.0
"""How long the end of a process waits for the last spans."""
WARN_EVERY_S: Final = 60.0


class SpanRecord(NamedTuple):
    """A span that has ended. Times are wall-clock nanoseconds."""

    trace: int
    id: int
    parent: int
    """0 for a root."""
    name: str
    begin_ns: int
    end_ns: int
    attributes: Mapping[str, str | int | float | bool]


class SpanExporter:
    """The queue, and the thread that empties it. Any thread may call `add`."""

    def __init__(self, endpoint: str, process: str, run: str, replica: str) -> None:
        """Start to export spans to `endpoint`.

        Args:
            endpoint: of the collector; without a path, that of OTLP is appended.
            process: the kind of the service, for ``service.name``.
            run: id of the run, for ``starling.run``.
            replica: name of the process, for ``service.instance.id``.

        Raises:
            ConfigError: the SDK is not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
        except ImportError as error:
            raise ConfigError(
                f"observe.traces.endpoint needs the SDK of OpenTelemetry ({error}): install starling-common[traces], "
                "or leave it empty"
            ) from None
        self.num_dropped = 0
        """Spans that were lost: the queue was full, or the collector did not take them."""
        self._queue: queue.Queue[SpanRecord | None] = queue.Queue(MAX_QUEUE)
        self._resource = Resource.create(
            {"service.name": f"starling-{process}", "service.instance.id": replica, "starling.run": run}
        )
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # what it would say again and again is said once
        self._exporter = OTLPSpanExporter(endpoint=with_path(endpoint), timeout=EXPORT_S)
        self._endpoint, self._warn_at = endpoint, float("-inf")
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def add(self, record: SpanRecord) -> None:
        """Export a span some time, or drop it; never waits."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.num_dropped += 1

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Export what is there, for at most `timeout_s`; the rest is lost."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while self._export(*self._batch()):
                pass
        except Exception:  # the edge of the thread: no error of the SDK may end the process, and it goes on untraced
            log.exception("traces_given_up", endpoint=self._endpoint)

    def _batch(self) -> tuple[list[SpanRecord], bool]:
        """Return the next spans, and whether more will come."""
        first = self._queue.get()
        if first is None:
            return [], False
        batch, deadline = [first], time.monotonic() + BATCH_S
        while len(batch) < MAX_BATCH:
            try:
                one = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if one is None:
                return batch, False
            batch.append(one)
        return batch, True

    def _export(self, batch: list[SpanRecord], goes_on: bool) -> bool:
        from opentelemetry.sdk.trace.export import SpanExportResult

        if batch:
            result = self._exporter.export([_readable(one, self._resource) for one in batch])
            if result is not SpanExportResult.SUCCESS:
                self.num_dropped += len(batch)
                self._warn()
        return goes_on

    def _warn(self) -> None:
        now = time.monotonic()
        if now >= self._warn_at:
            self._warn_at = now + WARN_EVERY_S
            log.warning("traces_lost", endpoint=self._endpoint, num_dropped=self.num_dropped)


def _readable(record: SpanRecord, resource: Any) -> Any:
    """Return a span as the exporter takes it, with the ids of `record`."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

    def context(span: int, *, is_remote: bool) -> SpanContext:
        return SpanContext(record.trace, span, is_remote=is_remote, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    return ReadableSpan(
        name=record.name,
        context=context(record.id, is_remote=False),
        parent=context(record.parent, is_remote=True) if record.parent else None,
        resource=resource,
        attributes=dict(record.attributes),
        kind=SpanKind.INTERNAL,
        start_time=record.begin_ns,
        end_time=max(record.begin_ns, record.end_ns),
    )


def with_path(endpoint: str) -> str:
    """Return the address to which traces are sent; one without a path gets that of OTLP/HTTP."""
    parts = urlsplit(endpoint)
    return (
        endpoint if parts.path.strip("/") else urlunsplit((parts.scheme, parts.netloc, "/v1/traces", parts.query, ""))
    )
