"""Spans of a policy in the traces of groups: the step that trains them, and the publication of its version."""

from __future__ import annotations

import threading
import time
from typing import Final

from starling.common.observe.tracing.ids import publish_work, step_work
from starling.common.observe.tracing.traces import GroupTraces
from starling.common.wire import messages as wire

MAX_STEPS: Final = 64
"""Steps that wait for a publication; older ones get no span of one."""


class StepTraces:
    """Records steps, in the thread that makes them, and publications, which end in another one."""

    def __init__(self, traces: GroupTraces, name: str) -> None:
        """`name`: of the policy."""
        self._traces, self._name = traces, name
        self._lock = threading.Lock()
        self._steps: dict[int, tuple[int, ...]] = {}
        """Traced groups of the steps that are not published yet."""
        self._publishing: dict[str, tuple[int, int]] = {}
        """By lease: the version, and when its publication began, in wall-clock nanoseconds."""

    def trained(self, message: wire.TrainStep, begun_ns: int) -> None:
        """Record a step that began at `begun_ns`; of policies that make it together the first one does."""
        found = (self._traces.trace(group.prompt_id) for group in message.groups)
        traces = tuple(trace for trace in found if trace)
        with self._lock:
            self._steps[message.step] = traces
            while len(self._steps) > MAX_STEPS:
                del self._steps[next(iter(self._steps))]
        if message.replica:
            return
        now_ns = time.time_ns()
        for trace in traces:
            self._traces.add(
                trace,
                step_work(message.step),
                "step",
                begun_ns,
                now_ns,
                version=message.step,
                groups=len(message.groups),
                replayed=message.replayed,
                replica=self._name,
            )

    def publishing(self, message: wire.PublishWeights) -> None:
        """Note that a publication begins."""
        with self._lock:
            self._publishing[message.lease] = (message.version, time.time_ns())
            while len(self._publishing) > MAX_STEPS:
                del self._publishing[next(iter(self._publishing))]

    def published(self, message: wire.WeightsPublished) -> None:
        """Record a publication that has ended, in the groups of all steps since the one before."""
        with self._lock:
            version, begun_ns = self._publishing.pop(message.lease, (-1, 0))
            steps = [(step, self._steps.pop(step)) for step in sorted(self._steps) if step <= version]
        now_ns = time.time_ns()
        for step, traces in steps:
            for trace in traces:
                work, above = publish_work(version), step_work(step)
                self._traces.add(
                    trace, work, "publish", begun_ns, now_ns, parent=above, version=version, replica=self._name
                )

    def close(self) -> None:
        """Export what is there, within a few seconds."""
        self._traces.close()
