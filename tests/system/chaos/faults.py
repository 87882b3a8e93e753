"""Faults drawn from a seed, and their injection into a run, which must recover from each.

| fault      | injection                                                      | recovery                            |
|------------|----------------------------------------------------------------|-------------------------------------|
| `Kill`     | SIGKILL one process                                            | a new one joins, and a step is done |
| `Hold`     | SIGSTOP one process for longer than its lease, then SIGCONT    | all are members, and a step is done |
| `FillDisk` | no space for the journal for some seconds                      | as after a hold                     |
| `KillCompacting` | SIGKILL the controller within a transaction that compacts the journal | as after a kill |
| `SetClock` | the time of day jumps by hours, and then one process is killed | as after a kill                     |
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from host_faults import HOUR_S, WallClock
from observation import Observation
from small_disk import Disk
from system_runs import Command

RECOVERY_S = 60.0
"""Deadline for the recovery from any fault, on a busy machine."""


@dataclass(frozen=True)
class Kill:
    """SIGKILL `name`."""

    name: str


@dataclass(frozen=True)
class Hold:
    """SIGSTOP `name`, and SIGCONT it after `seconds`."""

    name: str
    seconds: float


@dataclass(frozen=True)
class FillDisk:
    """Leave no space on the run's disk for `seconds`."""

    seconds: float


@dataclass(frozen=True)
class SetClock:
    """Set the time of day `seconds` from now (negative: back), then kill `name`."""

    seconds: float
    name: str


@dataclass(frozen=True)
class KillCompacting:
    """SIGKILL the controller while it compacts the journal."""


Fault = Kill | Hold | FillDisk | SetClock | KillCompacting


@dataclass(frozen=True)
class Recovery:
    """A fault, and the seconds from its end to the recovery of the run."""

    fault: Fault
    seconds: float


@dataclass
class Target:
    """A run, and the parts of its environment that faults act on."""

    command: Command
    observation: Observation
    replicas: frozenset[str]
    hold_s: float
    clock: WallClock | None = None
    disk: Disk | None = None
    compact_records: int = 0
    """Records after which the controller compacts the journal."""
    recoveries: list[Recovery] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Processes that faults may be injected into."""
        return ["controller", *sorted(self.replicas)]

    def faults(self, draw: random.Random, num: int) -> list[Fault]:
        """Draw `num` faults in random order; each kind comes once before any is repeated."""
        drawn: list[Fault] = []
        while len(drawn) < num:
            cycle: list[Fault] = [Kill(name) for name in self.names]
            cycle += [Hold(name, self.hold_s) for name in self.names]
            cycle.append(KillCompacting())
            if self.disk is not None:
                cycle.append(FillDisk(self.hold_s))
            if self.clock is not None:
                jumps = (draw.uniform(-48.0, -1.0), draw.uniform(1.0, 48.0))
                cycle += [SetClock(hours * HOUR_S, draw.choice(self.names)) for hours in jumps]
            draw.shuffle(cycle)
            drawn += cycle
        return drawn[:num]

    def inject(self, fault: Fault) -> Recovery:
        """Inject `fault` and wait for the recovery. Raises AssertionError when the run ends or the deadline passes."""
        self.wait_until_complete("a complete run before a fault")
        match fault:
            case Kill(name=name):
                recovery = Recovery(fault, self._kill(name))
            case KillCompacting():
                recovery = Recovery(fault, self._kill("controller", while_compacting=True))
            case SetClock(seconds=seconds, name=name):
                assert self.clock is not None
                self.clock.jump(seconds)
                recovery = Recovery(fault, self._kill(name))
            case Hold(name=name, seconds=seconds):
                process = self.command.process_titled(name)
                process.suspend()
                time.sleep(seconds)  # the fault itself, no synchronisation
                process.resume()
                recovery = Recovery(fault, self._wait_for_next_step())
            case FillDisk(seconds=seconds):
                assert self.disk is not None
                self.disk.fill()
                time.sleep(seconds)
                self.disk.free()
                recovery = Recovery(fault, self._wait_for_next_step())
        self.recoveries.append(recovery)
        return recovery

    def wait_until_complete(self, description: str) -> None:
        """Wait until every replica is a member, and every rollout has adopted a version.

        Libraries have been initialised by then. UCX for example patches the program at its first use and waits for
        other threads by the wall clock: if that were set back meanwhile, it would wait for hours.
        """
        self._wait_until(
            lambda: self.observation.members >= self.replicas and self.observation.all_adopted, description
        )

    def _kill(self, name: str, *, while_compacting: bool = False) -> float:
        process = self.command.process_titled(name)
        self.observation.refresh()
        joined = self.observation.joined[name]
        if name == "controller":
            self.observation.clear_snapshot()
        if while_compacting:
            self.observation.journal.pause_compactions(process.pid)
            self._wait_until(lambda: self._is_compacting(process.pid), "a compaction")
        begin = time.monotonic()
        process.send_signal(signal.SIGKILL)
        if name == "controller":
            self._wait_until(lambda: not process.is_running(), "the death of the controller")
            due = self.observation.journal.num_records() >= self.compact_records
            assert due or not while_compacting, "the compaction was complete before the controller was killed"
            self.observation.close()
        else:
            self._wait_until(lambda: self.observation.joined[name] > joined, f"another {name}")
        self._wait_for_step_after(self.observation.step)
        return time.monotonic() - begin

    def _is_compacting(self, pid: int) -> bool:
        """Say whether the controller has got as many records as it compacts, and is writing: it does that at once."""
        journal = self.observation.journal
        return journal.num_records() >= self.compact_records and journal.is_written_by(pid)

    def _wait_for_next_step(self) -> float:
        begin = time.monotonic()
        self.observation.refresh()
        self._wait_for_step_after(self.observation.step)
        return time.monotonic() - begin

    def _wait_for_step_after(self, version: int) -> None:
        """Wait until every replica is a member, and a step after `version` is completed."""
        self._wait_until(
            lambda: self.observation.members >= self.replicas and self.observation.version > version,
            f"all of {sorted(self.replicas)} and a step after {version}",
        )

    def _wait_until(self, condition: Callable[[], bool], description: str) -> None:
        def refreshed() -> bool:
            self.observation.refresh()
            return condition()

        self.command.wait_until(refreshed, description, RECOVERY_S)
