"""Controller front end: the groups that a run's controller assigns to this replica, over ZeroMQ."""

from __future__ import annotations

import os

from starling.common.net.link import CancelledLeases, ControllerLink, LinkClosed, ReceivedCommand
from starling.common.net.settings import LinkSettings
from starling.common.service import host_name
from starling.common.wire import messages as wire
from starling.reward.core import groups as core
from starling.reward.core.samples import Score
from starling.reward.score.decode.pool import AnyPool
from starling.reward.settings import RewardSettings


class ControllerFrontEnd:
    """The groups of one replica of a run."""

    def __init__(self, settings: RewardSettings, link: LinkSettings) -> None:
        self._groups = core.GroupScores(settings.weighted_scorers(), settings.num_slots, settings.bounds)
        hello = wire.Hello(role="reward", host=host_name(), pid=os.getpid(), num_slots=settings.num_slots)
        self._link = ControllerLink(link, hello)
        self._ended: LinkClosed | None = None

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Readable when `receive` may have something to do."""
        return tuple(self._link.descriptors)

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
                    self._carry_out(pool, self._groups.add(message))
                case CancelledLeases(leases=leases):
                    self._carry_out(pool, self._groups.cancel(leases))
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
        self._link.report(gauges=pool.gauges(), waits=pool.waits())

    def close(self, reason: str) -> None:
        """Leave the run. Raises what ended the connection, if that was a failure."""
        self._link.close(reason)
        if self._ended is not None and self._ended.error is not None:
            raise self._ended.error

    def _carry_out(self, pool: AnyPool, commands: list[core.Command]) -> None:
        for command in commands:
            match command:
                case core.SubmitTask(task=task):
                    self._link.work(task.id)
                    pool.submit(task)
                case core.CancelTask(lease=lease):
                    pool.cancel(lease)
                case core.SendScores(message=message):
                    self._link.answer(message.lease, message)
