"""The reward process: scores groups, with every scorer in a worker process that can be killed."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Sequence

import structlog

from starling.common.net.link import CancelledLeases, ControllerLink, LinkClosed, ReceivedCommand
from starling.common.observe.process import STOP_S, StopSignal, end_process, end_within, run_service
from starling.common.service import (
    ServiceArguments,
    host_name,
    link_settings,
    serve,
)
from starling.common.settings import ServiceSettings
from starling.common.wire import messages as wire
from starling.reward.core import groups as core
from starling.reward.score.workers.pool import ScoringPool, check_scorers
from starling.reward.settings import RewardSettings
from starling.reward.shell.quarantine import Quarantine
from starling.reward.shell.replay import replay

log = structlog.get_logger(__name__)

IDLE_S = 0.5
REPORT_INTERVAL_S = 0.1


class RewardProcess(ServiceSettings):
    """All settings of a reward process."""

    reward: RewardSettings


class Shell:
    """One reward replica."""

    def __init__(self, settings: RewardProcess, arguments: ServiceArguments) -> None:
        """Check every scorer before joining the run. Raises ConfigError when one cannot be used."""
        check_scorers(settings.reward)
        self._settings = settings.reward
        self._groups = core.GroupScores(
            settings.reward.weighted_scorers(), settings.reward.num_slots, settings.reward.bounds
        )
        hello = wire.Hello(role="reward", host=host_name(), pid=os.getpid(), num_slots=settings.reward.num_slots)
        self._quarantine = Quarantine(arguments.folder / "quarantine", settings.reward)
        self._link = ControllerLink(link_settings(arguments, settings), hello)
        self._ended: LinkClosed | None = None
        self._reported_at = float("-inf")

    def run(self, stop: StopSignal) -> None:
        """Serve until the controller ends the run, or `stop` is requested."""
        reason = "its service failed"
        stop.install(self._link.wake)
        # The workers die with the thread that starts them, so the pool belongs to the main thread.
        with ScoringPool(self._settings) as pool:
            self._link.start()
            log.info("ready", scorers=[scorer.title for scorer in self._settings.scorers])
            try:
                self._serve(pool, stop)
                reason = f"stopped by {stop.name}" if stop else "the run is over"
            finally:
                end_within(STOP_S)
                self._link.close(reason)
        if self._ended is not None and self._ended.error is not None:
            raise self._ended.error

    def _serve(self, pool: ScoringPool, stop: StopSignal) -> None:
        poller = select.poll()
        for descriptor in (*self._link.descriptors, pool.fileno()):
            poller.register(descriptor, select.POLLIN)
        while not stop:
            self._receive(pool)  # right before the wait, so that no message is left unread during it
            if self._ended is not None:
                return
            deadline = pool.next_deadline()
            patience_s = IDLE_S if deadline is None else min(IDLE_S, max(0.0, deadline - time.monotonic()))
            poller.poll(patience_s * 1000)
            for score in pool.poll():
                self._carry_out(pool, self._groups.record(score))
            for lost in pool.take_lost():
                self._quarantine.add(lost)
            if (now := time.monotonic()) - self._reported_at >= REPORT_INTERVAL_S:
                self._reported_at = now
                self._link.report(gauges=pool.gauges(), waits=pool.waits())

    def _receive(self, pool: ScoringPool) -> None:
        while (inbound := self._link.receive(0.0)) is not None:
            match inbound:
                case ReceivedCommand(message=wire.ScoreGroup() as message):
                    self._carry_out(pool, self._groups.add(message))
                case CancelledLeases(leases=leases):
                    self._carry_out(pool, self._groups.cancel(leases))
                case LinkClosed():
                    self._ended = inbound
                    return
                case _:
                    raise AssertionError(f"a reward service is not sent {inbound!r}")

    def _carry_out(self, pool: ScoringPool, commands: list[core.Command]) -> None:
        for command in commands:
            match command:
                case core.SubmitTask(task=task):
                    self._link.work(task.id)
                    pool.submit(task)
                case core.CancelTask(lease=lease):
                    pool.cancel(lease)
                case core.SendScores(message=message):
                    self._link.answer(message.lease, message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a reward replica, or a command that needs none."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments[:1] == ["replay"]:
        return run_service("reward", lambda: replay(arguments[1:]))
    return serve("reward", RewardProcess, Shell, arguments)


if __name__ == "__main__":
    end_process(main())
