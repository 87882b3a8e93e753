"""A whole run on simulated time: the real cores, and around them a network, replicas and faults.

Everything is decided by the scenario. Each message is packed and unpacked as on the wire. After every event
`invariants` looks into the controller, and `promises` follows its journal and what it says and has done.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from starling.common.wire import codec
from starling.controller.core.events import Received, ReplicaDisconnected, StopRequested
from starling.sim.checks.guarantees import Guarantees
from starling.sim.checks.invariants import Invariants
from starling.sim.cluster.controller_host import ControllerHost
from starling.sim.cluster.operator import NAME, SimulatedOperator
from starling.sim.environment.clock import SimulatedClock
from starling.sim.environment.network import SimulatedNetwork
from starling.sim.errors import Violation
from starling.sim.replicas.collective import Collective, StepItem
from starling.sim.replicas.policy import SimulatedPolicy
from starling.sim.replicas.replica import Frames, SimulatedReplica
from starling.sim.replicas.reward import SimulatedReward
from starling.sim.replicas.rollout import FAREWELL_S, SimulatedRollout
from starling.sim.replicas.teacher import SimulatedTeacher
from starling.sim.scenario.scenario import SLOTS, Scenario

ROLES = ("policy", "rollout", "reward", "teacher")
RESTART_S = 3.0
"""Most seconds until a dead replica is started again."""
REPLACED = 0.2
"""Share of the dead replicas in whose place one of another name is started."""


@dataclass(frozen=True)
class StepSeen:
    """What one step trained, and when it was made."""

    made_at: float
    staleness: tuple[int, ...]
    """Of each completion, in versions."""
    num_tokens: int


class SimulatedCluster:
    """The clock, the network, the controller and its replicas."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.plan, self.faults = scenario, scenario.plan, scenario.faults
        self.rng = random.Random(f"world {scenario.seed}")
        self.clock = SimulatedClock()
        self.network = SimulatedNetwork(self.clock, self.rng, scenario.faults)
        self.collective = Collective()
        self.promises = Guarantees(scenario.plan)
        self.invariants = Invariants(scenario.plan, self.promises, scenario.patience_s / 3)
        self.replicas: dict[str, SimulatedReplica] = {}
        self.operator = SimulatedOperator(self)
        self.saved: dict[int, str] = {}
        """Digest of each state that a policy saved, by version."""
        self.steps: list[StepSeen] = []
        """Steps of reinforcement learning, each as it was first made."""
        self.busy_s: dict[str, float] = dict.fromkeys(ROLES, 0.0)
        """Seconds of work by role; of a rollout, of each of its slots."""
        self._born: dict[str, int] = dict.fromkeys(ROLES, 0)
        self._joining = [role for role in ROLES if self._is_wanted(role)]
        """The roles that the run has."""
        self._stopped = False
        self.host = ControllerHost(self)

    def _is_wanted(self, role: str) -> bool:
        match role:
            case "policy":
                return self.plan.has_policy
            case "reward":
                return self.plan.num_rewards > 0
            case "teacher":
                return self.plan.num_teachers > 0
            case _:
                return True

    @property
    def now(self) -> float:
        """Simulated seconds since the beginning."""
        return self.clock.now

    def run(self) -> SimulatedCluster:
        """Run to the end.

        Raises:
            Violation: a promise is broken, or the run does not end.
        """
        try:
            self.host.start()
            self._start_fleet()
            self._start_faults()
            if self.scenario.stop_at is not None:
                self.clock.after(self.scenario.stop_at, self._stop)
            while self.host.finish is None:
                self.clock.advance()
                if self.now > self.scenario.patience_s:
                    raise Violation(f"the run hangs; it waits for {self.invariants.waiting_for}")
            self.invariants.at_end(self.host.finish, whole=not self._stopped)
            self.promises.at_end(self.invariants.version, whole=not self._stopped)
        except Exception as broken:  # whatever a core throws is a finding, and goes on as one
            what = str(broken) if isinstance(broken, Violation) else f"{type(broken).__name__}: {broken}"
            raise Violation(f"{what} (after {self.host.num_events} events, {self.now:.2f} s)") from broken
        return self

    # --- what the replicas need ------------------------------------------------------------------------------------

    def to_controller(self, name: str, frames: Frames) -> None:
        """Carry what a replica says."""
        self.network.carry(name, True, self._hear, frames)

    def _hear(self, frames: Frames) -> None:
        envelope, message = codec.unpack_envelope(frames), codec.unpack_up(frames)
        buffers = tuple(bytes(frame) for frame in frames[2:])
        cause = f"{envelope.sender}/{envelope.incarnation}/{envelope.seq}"
        self.host.take(Received(self.now, envelope.sender, envelope.incarnation, message, buffers), cause)

    def peer(self, name: str) -> SimulatedReplica | SimulatedOperator | None:
        """Return who has this name."""
        return self.operator if name == NAME else self.replicas.get(name)

    def pull_problem(self, source: str, epoch: int, version: int) -> str | None:
        """Say why `version` could not be pulled from this incarnation of `source`, or None when it was."""
        holder = self.replicas.get(source)
        if holder is None or not holder.alive or holder.epoch != epoch:
            return f"{source} is gone"
        if holder.offered != version:
            return f"{source} has version {holder.offered} on offer now"
        return "the line broke" if self.rng.random() < self.faults.pull_failures else None

    def note_step(self, whole: dict[str, StepItem]) -> None:
        """A step of reinforcement learning was made for the first time."""
        stale = tuple(value for piece in whole.values() for value in piece.staleness)
        self.steps.append(StepSeen(self.now, stale, sum(piece.num_tokens for piece in whole.values())))

    # --- the fleet -------------------------------------------------------------------------------------------------

    def start_again(self, replica: SimulatedReplica) -> None:
        """Do what a supervisor does with a replica that has ended: start it again after a while."""
        again = self.rng.uniform(0.1, RESTART_S)
        self.clock.after(again, self._start, replica.role, replica.name, replica.epoch + 1)

    def _start_fleet(self) -> None:
        fleet = self.scenario.fleet
        numbers = (fleet.num_policies, fleet.num_rollouts, fleet.num_rewards, fleet.num_teachers)
        for role, num in zip(ROLES, numbers, strict=True):
            for _ in range(num):
                self._start(role)

    def _start(self, role: str, name: str = "", epoch: int = 1) -> None:
        """Start a replica, under the next free name of its role if none is given."""
        if not name:
            name = f"{role}-{self._born[role]}"
            self._born[role] += 1
        num_slots = self.scenario.fleet.num_slots or self.rng.randint(1, SLOTS)
        replica: SimulatedReplica
        if role == "policy":
            replica = SimulatedPolicy(self, name, epoch)
        elif role == "rollout":
            replica = SimulatedRollout(self, name, epoch, num_slots)
            speeds = self.scenario.fleet.speeds
            if speeds:
                replica.slowness = 1 / speeds[int(name.rpartition("-")[2]) % len(speeds)]
        elif role == "reward":
            replica = SimulatedReward(self, name, epoch, num_slots)
        else:
            replica = SimulatedTeacher(self, name, epoch, num_slots)
        self.replicas[name] = replica
        self.clock.after(self.plan.heartbeat_s * self.rng.random(), replica.begin)

    def _alive(self, *roles: str) -> list[str]:
        return [name for name, replica in self.replicas.items() if replica.alive and replica.role in roles]

    # --- what goes wrong -------------------------------------------------------------------------------------------

    def _start_faults(self) -> None:
        faults = self.faults
        self._every(faults.rollout_crash_every_s, lambda: self._crash("rollout"))
        self._every(faults.reward_crash_every_s, lambda: self._crash("reward"))
        self._every(faults.teacher_crash_every_s, lambda: self._crash("teacher"))
        self._every(faults.policy_crash_every_s, lambda: self._crash("policy"))
        self._every(faults.controller_crash_every_s, self.host.crash)
        self._every(faults.partition_every_s, self._part)
        self._every(faults.wish_every_s, self.operator.want_something)
        self._every(faults.join_every_s, self._join)
        self._every(faults.leave_every_s, self._leave)
        self._every(faults.preempt_every_s, self._preempt)

    def _every(self, mean_s: float, fault: Callable[[], None]) -> None:
        """Have a fault happen again and again, at random."""
        if not mean_s:
            return

        def happen() -> None:
            fault()
            self.clock.after(self.rng.expovariate(1 / mean_s), happen)

        self.clock.after(self.rng.expovariate(1 / mean_s), happen)

    def _crash(self, role: str) -> None:
        names = self._alive(role)
        if not names:
            return
        name = self.rng.choice(names)
        old = self.replicas[name]
        old.die()
        if self.rng.random() >= self.faults.silent_deaths:
            self.clock.after(0.02 * self.rng.random(), self._lose, name)
        replaced = self.rng.random() < REPLACED
        again = self.rng.uniform(0.1, RESTART_S)
        self.clock.after(again, self._start, role, *(() if replaced else (name, old.epoch + 1)))

    def _lose(self, name: str) -> None:
        self.host.take(ReplicaDisconnected(self.now, name))

    def _part(self) -> None:
        """Cut some replicas off from the controller for a while; what they do among each other goes on."""
        names = self._alive(*ROLES)
        chosen = [name for name in names if self.rng.random() < self.rng.choice((0.1, 0.3, 1.0))]
        late = self.rng.random() < self.faults.late if self.faults.late else False
        self.network.part(chosen, late=late)
        if self.rng.random() >= self.faults.silent_deaths:
            for name in chosen:
                self.clock.after(0.02 * self.rng.random(), self._lose, name)
        longest_s = self.faults.cut_leases * self.plan.lease_s
        self.clock.after(longest_s * self.rng.random() ** 2, self.network.heal, chosen)

    def _join(self) -> None:
        self._start(self.rng.choice(self._joining))

    def _leave(self) -> None:
        """Let a replica go, if its role has more than the run needs to begin."""
        plan = self.plan
        needed = dict(
            zip(ROLES, (plan.num_policies, plan.num_rollouts, plan.num_rewards, plan.num_teachers), strict=True)
        )
        role = self.rng.choice(self._joining)
        names = self._alive(role)
        if len(names) > needed[role]:
            self.replicas[self.rng.choice(names)].leave("it is needed elsewhere")

    def _preempt(self) -> None:
        """Let a rollout go, whose place is needed for a moment."""
        names = self._alive("rollout")
        if names:
            replica = self.replicas[self.rng.choice(names)]
            replica.leave("its place is needed")
            self.clock.after(FAREWELL_S, self.start_again, replica)

    def _stop(self) -> None:
        self._stopped = True
        if self.host.up:
            self.host.take(StopRequested(self.now, "stopped"))
        else:
            self.clock.after(0.5, self._stop)
