"""What can go wrong in a run, drawn from a seed, and struck at a run that goes on until it is whole again.

| fault      | what is done                                                   | what has to follow                  |
|------------|----------------------------------------------------------------|-------------------------------------|
| `Kill`     | SIGKILL one process                                            | a new one joins, and a step is made |
| `Hold`     | SIGSTOP one process for longer than its lease, then SIGCONT    | all are members, and a step is made |
| `FillDisk` | no room for the journal for some seconds                       | as after a hold                     |
| `SetClock` | the time of day jumps by hours, and then one process is killed | as after a kill                     |
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from host_faults import HOUR_S, Disk, WallClock
from observation import Observation
from system_runs import Command

RECOVERY_S = 60.0
"""Within this a run is whole again after any fault, on a busy machine."""


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
    """Leave no room on the run's disk for `seconds`."""

    seconds: float


@dataclass(frozen=True)
class SetClock:
    """Set the time of day `seconds` from now (negative: back), then kill `name`."""

    seconds: float
    name: str


Fault = Kill | Hold | FillDisk | SetClock


@dataclass(frozen=True)
class Recovery:
    """A fault, and after how many seconds from its end the run was whole again."""

    fault: Fault
    seconds: float


@dataclass
class Target:
    """A run that goes on, and its surroundings as far as faults can reach them."""

    command: Command
    observation: Observation
    replicas: frozenset[str]
    hold_s: float
    clock: WallClock | None = None
    disk: Disk | None = None
    recoveries: list[Recovery] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Every process that may be struck."""
        return ["controller", *sorted(self.replicas)]

    def faults(self, draw: random.Random, num: int) -> list[Fault]:
        """Draw `num` faults. Each kind comes once, in an order that is drawn, before any comes again."""
        drawn: list[Fault] = []
        while len(drawn) < num:
            cycle: list[Fault] = [Kill(name) for name in self.names]
            cycle += [Hold(name, self.hold_s) for name in self.names]
            if self.disk is not None:
                cycle.append(FillDisk(self.hold_s))
            if self.clock is not None:
                jumps = (draw.uniform(-48.0, -1.0), draw.uniform(1.0, 48.0))
                cycle += [SetClock(hours * HOUR_S, draw.choice(self.names)) for hours in jumps]
            draw.shuffle(cycle)
            drawn += cycle
        return drawn[:num]

    def strike(self, fault: Fault) -> Recovery:
        """Do it, and wait until the run is whole again. Raises AssertionError when it ends, or is not in time."""
        self.until_whole("the run to be whole before a fault")
        match fault:
            case Kill(name=name):
                recovery = Recovery(fault, self._kill(name))
            case SetClock(seconds=seconds, name=name):
                assert self.clock is not None
                self.clock.jump(seconds)
                recovery = Recovery(fault, self._kill(name))
            case Hold(name=name, seconds=seconds):
                process = self.command.titled(name)
                process.suspend()
                time.sleep(seconds)  # that is the fault
                process.resume()
                recovery = Recovery(fault, self._until_it_goes_on())
            case FillDisk(seconds=seconds):
                assert self.disk is not None
                self.disk.fill()
                time.sleep(seconds)
                self.disk.free()
                recovery = Recovery(fault, self._until_it_goes_on())
        self.recoveries.append(recovery)
        return recovery

    def until_whole(self, what: str) -> None:
        """Wait until every replica is a member, and every rollout has adopted a version.

        What a library does once, when it is loaded, is done then. UCX for example patches the program at its first
        use, waits for other threads by the time of day, and would wait for hours if that were set back meanwhile.
        """
        self._until(lambda: self.observation.members >= self.replicas and self.observation.all_adopted, what)

    def _kill(self, name: str) -> float:
        process = self.command.titled(name)
        self.observation.look()
        joined = self.observation.joined[name]
        if name == "controller":
            self.observation.forget()
        begin = time.monotonic()
        process.send_signal(signal.SIGKILL)
        if name == "controller":
            self._until(lambda: not process.is_running(), "the death of the controller")
            self.observation.close()
        else:
            self._until(lambda: self.observation.joined[name] > joined, f"another {name}")
        self._until_beyond(self.observation.step)
        return time.monotonic() - begin

    def _until_it_goes_on(self) -> float:
        begin = time.monotonic()
        self.observation.look()
        self._until_beyond(self.observation.step)
        return time.monotonic() - begin

    def _until_beyond(self, version: int) -> None:
        """Wait until every replica is a member, and a step after `version` is made."""
        self._until(
            lambda: self.observation.members >= self.replicas and self.observation.version > version,
            f"all of {sorted(self.replicas)} and a step after {version}",
        )

    def _until(self, happened: Callable[[], bool], what: str) -> None:
        def looked() -> bool:
            self.observation.look()
            return happened()

        self.command.until(looked, what, RECOVERY_S)
