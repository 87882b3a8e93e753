"""Controller front end: the groups that a run's controller assigns to this replica, over ZeroMQ."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from starling.common.net.link import CancelledLeases, ControllerLink, LinkClosed, ReceivedCommand
from starling.common.net.settings import LinkSettings
from starling.common.observe.profiling.profiler import ActiveProfile, Profiler
from starling.common.observe.tracing.traces import GroupTraces
from starling.common.service import host_name
from starling.common.wire import messages as wire
from starling.reward.core import groups as core
from starling.reward.core.samples import Score
from starling.reward.score.decode.start import AnyPool
from starling.reward.settings import RewardSettings

if TYPE_CHECKING:
    from starling.common.observe.metrics import Samples
    from starling.reward.score.metrics import Latencies


class ControllerFrontEnd:
    """The groups of one replica of a run."""

    def __init__(
        self, settings: RewardSettings, link: LinkSettings, folder: Path, traces: GroupTraces | None = None
    ) -> None:
        """`folder`: of the run; `traces`: None where they are off."""
        self._groups = core.GroupScores(settings.weighted_scorers(), settings.num_slots, settings.bounds)
        hello = wire.Hello(role="reward", host=host_name(), pid=os.getpid(), num_slots=settings.num_slots)
        self._link = ControllerLink(link, hello)
        self._name, self._traces = link.name, traces
        self._profiler = Profiler(link.name, folder, self._link.report_profile, has_tensors=False)
        self._ended: LinkClosed | None = None
        self._latencies: Latencies | None = None
        """Of groups, where they are measured."""

    def measure(self) -> None:
        """Measure the latencies of groups from now on."""
        # Imported here: a service whose metrics nobody can read does not load it.
        from starling.reward.score.metrics import Latencies

        self._latencies = Latencies("controller")

    def samples(self) -> Samples:
        """Return the measured metrics; none before `measure`."""
        return {} if self._latencies is None else self._latencies.samples()

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Readable when `receive` may have something to do."""
        return tuple(self._link.descriptors)

    @property
    def serves(self) -> bool:
        """Whether it has joined the run."""
        return self._link.joined

    def describe(self) -> str:
        """Return the state in one line."""
        return self._link.describe()

    def wake(self) -> None:
        """Make `descriptors` readable; from any thread, and in a signal handler."""
        self._link.wake()

    def start(self) -> None:
        """Join the run."""
        self._link.start()

    def receive(self, pool: AnyPool) -> bool:
        """Carry out all commands that have arrived. Returns False when the controller has ended the run."""
        while (inbound := self._link.receive(0.0)) is not None:
            match inbound:
                case ReceivedCommand(message=wire.ScoreGroup() as message):
                    if self._latencies is not None:
                        self._latencies.begin(message.lease, time.monotonic())
                    if self._traces is not None:
                        self._traces.begin(message.lease, message.prompt.id)
                    self._carry_out(pool, self._groups.add(message))
                case CancelledLeases(leases=leases):
                    if self._latencies is not None:
                        self._latencies.forget(*leases)
                    self._carry_out(pool, self._groups.cancel(leases))
                case wire.Profile():
                    self._profiler.arm(inbound)
                case LinkClosed():
                    self._ended = inbound
                    return False
                case _:
                    raise AssertionError(f"a reward service is not sent {inbound!r}")
        return True

    def next_deadline(self) -> float | None:
        """Return None: the controller limits the time of a group."""
        return None

    def record(self, pool: AnyPool, score: Score) -> None:
        """Record a score, unless it is of another front end."""
        self._carry_out(pool, self._groups.record(score))

    def report(self, pool: AnyPool) -> None:
        """Update what the heartbeats say."""
        self._profiler.check()
        self._link.report(gauges=pool.gauges(), waits=pool.waits())

    def close(self, reason: str) -> None:
        """Leave the run. Raises what ended the connection, if that was a failure."""
        self._profiler.end()
        self._link.close(reason)
        if self._traces is not None:
            self._traces.close()
        if self._ended is not None and self._ended.error is not None:
            raise self._ended.error

    def _carry_out(self, pool: AnyPool, commands: list[core.Command]) -> None:
        if self._profiler.active is not None:
            self._record(self._profiler.active, commands)
        for command in commands:
            match command:
                case core.SubmitTask(task=task):
                    self._link.work(task.id)
                    pool.submit(task)
                case core.CancelTask(lease=lease):
                    if self._traces is not None:
                        self._traces.forget(lease)
                    pool.cancel(lease)
                case core.SendScores(message=message):
                    if self._latencies is not None:
                        self._latencies.end(message.lease, time.monotonic())
                    if self._traces is not None:
                        self._traces.end(message.lease, "score", replica=self._name, lease=message.lease)
                    self._link.answer(message.lease, message)

    def _record(self, active: ActiveProfile, commands: list[core.Command]) -> None:
        """Record the begin and the end of groups."""
        for command in commands:
            match command:
                case core.SubmitTask(task=task):
                    active.spans.begin(task.id, "score")
                case core.CancelTask(lease=lease):
                    active.spans.end(lease, cancelled=True)
                case core.SendScores(message=message):
                    if active.spans.end(message.lease):
                        active.count()
