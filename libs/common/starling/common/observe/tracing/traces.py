"""Spans of one process in the traces of groups: which groups are traced, and where their spans hang."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from starling.common.observe.tracing.ids import ROOT, is_sampled, span_id, trace_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from starling.common.observe.tracing.exporter import SpanRecord
    from starling.common.settings import TraceSettings

MAX_BEGUN: Final = 16_384
"""Spans that have begun; beyond them the oldest is forgotten."""


class GroupTraces:
    """The traces of a process. Its methods may be called by any thread, each span's by one at a time."""

    def __init__(
        self, export: Callable[[SpanRecord], None], run: str, share: float, close: Callable[[], None] = lambda: None
    ) -> None:
        """`export` takes each span that has ended, and `close` exports what is there; `share`: of the groups."""
        self._export, self._close, self._run, self._share = export, close, run, share
        self._begun: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """By the name of the work: trace, and wall-clock nanoseconds."""

    def trace(self, prompt: str) -> int:
        """Return the trace of a group, by the id of its prompt; 0 if it is not traced."""
        trace = trace_id(self._run, prompt)
        return trace if is_sampled(trace, self._share) else 0

    def begin(self, work: str, prompt: str) -> None:
        """Begin a span of a group, if that is traced."""
        if trace := self.trace(prompt):
            self._begun[work] = (trace, time.time_ns())
            if len(self._begun) > MAX_BEGUN:
                self._begun.popitem(last=False)

    def end(self, work: str, name: str, *, parent: str = ROOT, **attributes: str | int | float | bool) -> None:
        """End the span of `work`, if it has begun; it is a child of that of the work `parent`."""
        begun = self._begun.pop(work, None)
        if begun is not None:
            trace, begin_ns = begun
            self.add(trace, work, name, begin_ns, time.time_ns(), parent=parent, **attributes)

    def forget(self, work: str) -> None:
        """Drop a span that has begun: its work was cancelled."""
        self._begun.pop(work, None)

    def add(
        self,
        trace: int,
        work: str,
        name: str,
        begin_ns: int,
        end_ns: int,
        *,
        parent: str = ROOT,
        **attributes: str | int | float | bool,
    ) -> None:
        """Export a span that has ended; the one of `ROOT` has no parent."""
        from starling.common.observe.tracing.exporter import SpanRecord

        above = 0 if work == ROOT else span_id(trace, parent)
        self._export(SpanRecord(trace, span_id(trace, work), above, name, begin_ns, end_ns, attributes))

    def close(self) -> None:
        """Export what is there, within a few seconds."""
        self._close()


def open_traces(settings: TraceSettings, run: str, role: str, name: str) -> GroupTraces | None:
    """Return the traces of this process; None where they are off.

    Args:
        settings: the endpoint and the share of groups.
        run: id of the run.
        role: of the process.
        name: of the process.

    Raises:
        ConfigError: the SDK is not installed.
    """
    if not settings.endpoint:
        return None
    # Imported here: a service without traces does not load it, nor the SDK.
    from starling.common.observe.tracing.exporter import SpanExporter

    exporter = SpanExporter(settings.endpoint, role, run, name)
    return GroupTraces(exporter.add, run, settings.share, exporter.close)
