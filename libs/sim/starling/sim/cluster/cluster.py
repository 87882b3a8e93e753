"""Simulated cluster: the real cores in simulated time, surrounded by a network, replicas and faults.

The scenario determines the run. Each message is encoded and decoded as on the wire. After every event `Invariants`
checks the state of the controller, and `Guarantees` its journal, its messages and the steps of the policies.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

from starling.common.wire import codec
from starling.controller.core.events import Received, ReplicaDisconnected, StopRequested
from starling.sim.checks.autoscaling import AutoscaleChecks
from starling.sim.checks.guarantees import Guarantees
from starling.sim.checks.invariants import Invariants
from starling.sim.cluster.controller_host import ControllerHost
from starling.sim.cluster.launcher import PLACE_EVERY_S, SimulatedLauncher
from starling.sim.cluster.operator import NAME, SimulatedOperator
from starling.sim.environment.clock import SimulatedClock
from starling.sim.environment.network import SimulatedNetwork
from starling.sim.errors import Violation
from starling.sim.replicas.collective import Collective, StepItem
from starling.sim.replicas.policy import SimulatedPolicy
from starling.sim.replicas.replica import Frames, SimulatedReplica
from starling.sim.replicas.reward import SimulatedReward
from starling.sim.replicas.rollout import LEAVE_TIMEOUT_S, SimulatedRollout
from starling.sim.replicas.teacher import SimulatedTeacher
from starling.sim.replicas.weights import FLIPPED, content_of
from starling.sim.scenario.scenario import MAX_SLOTS, Scenario

ROLES = ("policy", "rollout", "reward", "teacher")
RESTART_S = 3.0
"""Longest time until a dead replica is restarted."""
REPLACED_SHARE = 0.2
"""Share of the dead replicas that are replaced by one of another name."""


@dataclass(frozen=True)
class TrainedStep:
    """One step of reinforcement learning, at the time when it was first made."""

    made_at: float
    staleness: tuple[int, ...]
    """Of each completion, in versions."""
    num_tokens: int


class SimulatedCluster:
    """The clock, the network, the controller and the replicas of one run."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.plan, self.faults = scenario, scenario.plan, scenario.faults
        self.rng = random.Random(f"world {scenario.seed}")
        self.clock = SimulatedClock()
        self.network = SimulatedNetwork(self.clock, self.rng, scenario.faults)
        self.collective = Collective()
        self.guarantees = Guarantees(scenario.plan)
        self.invariants = Invariants(
            scenario.plan, self.guarantees, scenario.timeout_s / 3, has_liars=scenario.faults.lies > 0
        )
        self.replicas: dict[str, SimulatedReplica] = {}
        self.operator = SimulatedOperator(self.clock, self.rng, self.guarantees, self.to_controller)
        self.saved: dict[int, str] = {}
        """Digest of each state that a policy saved, by version."""
        self.steps: list[TrainedStep] = []
        """The steps of reinforcement learning so far."""
        self.busy_s: dict[str, float] = dict.fromkeys(ROLES, 0.0)
        """Seconds of work by role; of rollouts, summed over their slots."""
        self._restarting: set[str] = set()
        """Names of the replicas that died and will be restarted."""
        self.launcher = SimulatedLauncher(self.clock, self.rng, scenario.faults, self._start_placed)
        self.autoscaling = AutoscaleChecks(scenario.plan, self.clock)
        self._roles = [role for role in ROLES if self._has_role(role)]
        self._stopped, self._stopped_incarnation = False, -1
        self._liars: set[str] = set()
        """Names of the replicas that lie."""
        self.forger = ""
        """Name of the rollout that sends other weights than were published."""
        self._followers = set[str]()
        """Names of the rollouts without slots."""
        self.accused = set[str]()
        self.num_false_pulls = 0
        """Pulls from a replica that sent other weights than were published."""
        self.host = ControllerHost(
            scenario,
            self.clock,
            self.rng,
            self.network,
            self.invariants,
            self.guarantees,
            self.autoscaling,
            self._find_peer,
        )

    def _has_role(self, role: str) -> bool:
        match role:
            case "policy":
                return self.plan.kind.trains or self.plan.fans_out
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
            Violation: an invariant or a guarantee is violated, a core fails, or the run does not end.
        """
        try:
            self.host.start()
            self._start_fleet()
            self._start_faults()
            if self.scenario.stop_at is not None:
                self.clock.after(self.scenario.stop_at, self._stop)
            while self.host.finish is None:
                self.clock.advance()
                if self.now > self.scenario.timeout_s:
                    raise Violation(f"the run hangs; it waits for {self.invariants.waiting_for}")
            self.invariants.at_end(self.host.finish, whole=not self._stopped)
            self.guarantees.at_end(self.invariants.version, whole=not self._stopped)
        except Exception as error:  # an exception of a core is a finding too
            problem = str(error) if isinstance(error, Violation) else f"{type(error).__name__}: {error}"
            raise Violation(f"{problem} (after {self.host.num_events} events, {self.now:.2f} s)") from error
        return self

    # --- the interface of the replicas -----------------------------------------------------------------------------

    def to_controller(self, name: str, frames: Frames) -> None:
        """Send the message of a replica or an operator to the controller."""
        self.network.send(name, True, self._arrive, frames)

    def _arrive(self, frames: Frames) -> None:
        envelope, message = codec.unpack_envelope(frames), codec.unpack_up(frames)
        buffers = tuple(bytes(frame) for frame in frames[2:])
        cause = f"{envelope.sender}/{envelope.incarnation}/{envelope.seq}"
        self.host.handle(Received(self.now, envelope.sender, envelope.incarnation, message, buffers), cause)

    def _find_peer(self, name: str) -> SimulatedReplica | SimulatedOperator | None:
        return self.operator if name == NAME else self.replicas.get(name)

    def pull_problem(self, source: str, incarnation: int, version: int) -> str | None:
        """Return why `version` could not be pulled from this incarnation of `source`, or None if it was."""
        holder = self.replicas.get(source)
        if holder is None or not holder.alive or holder.incarnation != incarnation:
            return f"{source} is gone"
        if holder.offered != version:
            return f"{source} has version {holder.offered} on offer now"
        return "the connection broke" if self.rng.random() < self.faults.pull_failures else None

    def sent_by(self, source: str, version: int) -> bytes:
        """Return the bytes of `version` as `source` sends them: others, if it lies."""
        holder = self.replicas[source]
        if holder.forges_weights:
            self.num_false_pulls += 1
            return FLIPPED
        return holder.content if isinstance(holder, SimulatedRollout) else content_of(version)

    def record_step(self, items: dict[str, StepItem]) -> None:
        """Record a step of reinforcement learning that was made for the first time."""
        staleness = tuple(value for item in items.values() for value in item.staleness)
        self.steps.append(TrainedStep(self.now, staleness, sum(item.num_tokens for item in items.values())))

    # --- the fleet -------------------------------------------------------------------------------------------------

    def restart_later(self, replica: SimulatedReplica) -> None:
        """Restart a replica that has ended, after a random delay, as a supervisor does."""
        delay_s = self.rng.uniform(0.1, RESTART_S)
        self._restarting.add(replica.name)
        self.clock.after(delay_s, self._restart, replica)

    def _restart(self, ended: SimulatedReplica) -> None:
        """Start a replica again, unless the launcher was told that it is not needed, or has placed it anew."""
        self._restarting.discard(ended.name)
        if ended.name not in self.launcher.unneeded and self.replicas[ended.name] is ended:
            self._start(ended.role, ended.name, ended.incarnation + 1)

    def _start_fleet(self) -> None:
        fleet = self.scenario.fleet
        numbers = (fleet.num_policies, fleet.num_rollouts, fleet.num_rewards, fleet.num_teachers)
        for role, num in zip(ROLES, numbers, strict=True):
            for _ in range(num):
                self._start(role)
        for _ in range(fleet.num_followers):
            self._followers.add(self._next_name("rollout"))
            self._start("rollout")
        for role in ("rollout", "reward") if self.faults.lies else ():
            if role in self._roles:
                self._liars.add(self._next_name(role))
                self._start(role)
        if self.faults.lies and "rollout" in self._roles:
            self.forger = self._next_name("rollout")
            self._start("rollout")

    def _start(self, role: str, name: str = "", incarnation: int = 1) -> None:
        """Start a replica, under the next free name of its role unless one is given."""
        name = name or self._next_name(role)
        num_slots = self.scenario.fleet.num_slots or self.rng.randint(1, MAX_SLOTS)
        if name in self._followers:
            num_slots = 0
        replica: SimulatedReplica
        if role == "policy":
            replica = SimulatedPolicy(self, name, incarnation)
        elif role == "rollout":
            replica = SimulatedRollout(self, name, incarnation, num_slots)
            speeds = self.scenario.fleet.speeds
            if speeds:
                replica.slowness = 1 / speeds[int(name.rpartition("-")[2]) % len(speeds)]
        elif role == "reward":
            replica = SimulatedReward(self, name, incarnation, num_slots)
        else:
            replica = SimulatedTeacher(self, name, incarnation, num_slots)
        replica.lies = self.faults.lies if name in self._liars else 0.0
        replica.forges_weights = name == self.forger
        self.replicas[name] = replica
        self.clock.after(self.plan.heartbeat_s * self.rng.random(), replica.begin)

    def _start_placed(self, role: str, name: str) -> None:
        """Start what the launcher has placed: a name that a joining replica has taken meanwhile has two processes."""
        self._start(role, name, self.replicas[name].incarnation + 1 if name in self.replicas else 1)

    def _next_name(self, role: str) -> str:
        """Return a name that no replica of `role` has had."""
        return next(name for i in itertools.count() if (name := f"{role}-{i}") not in self.replicas)

    def _alive(self, *roles: str) -> list[str]:
        return [name for name, replica in self.replicas.items() if replica.alive and replica.role in roles]

    # --- faults ----------------------------------------------------------------------------------------------------

    def _start_faults(self) -> None:
        faults = self.faults
        self._every(faults.rollout_crash_every_s, lambda: self._crash("rollout"))
        self._every(faults.reward_crash_every_s, lambda: self._crash("reward"))
        self._every(faults.teacher_crash_every_s, lambda: self._crash("teacher"))
        self._every(faults.policy_crash_every_s, lambda: self._crash("policy"))
        self._every(faults.policy_hang_every_s, self._hang)
        self._every(faults.controller_crash_every_s, self.host.crash)
        self._every(faults.power_cut_every_s, self._lose_power)
        self._every(faults.partition_every_s, self._partition)
        self._every(faults.request_every_s, self.operator.make_request)
        if faults.scale_every_s:
            self._every(faults.scale_every_s, lambda: self.operator.scale(self._roles, self._alive(*ROLES)))
        if faults.scale_every_s or self.plan.autoscale is not None:
            self.clock.after(PLACE_EVERY_S, self._place_missing)
        self._every(faults.join_every_s, self._join)
        self._every(faults.leave_every_s, self._leave)
        self._every(faults.preempt_every_s, self._preempt)

    def _every(self, mean_s: float, fault: Callable[[], None]) -> None:
        """Repeat a fault at random intervals."""
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
            self.clock.after(0.02 * self.rng.random(), self._disconnect, name)
        if self.rng.random() < REPLACED_SHARE:
            self.clock.after(self.rng.uniform(0.1, RESTART_S), self._start, role)
        else:
            self.restart_later(old)

    def _lose_power(self) -> None:
        """Stop everything at once. What remains is on disks: durable records, files, and the states that were saved."""
        self.network.lose_all()
        self.host.lose_power()
        for name in self._alive(*ROLES):
            self.replicas[name].die()
            self.restart_later(self.replicas[name])

    def _disconnect(self, name: str) -> None:
        self.host.handle(ReplicaDisconnected(self.now, name))

    def _partition(self) -> None:
        """Cut some replicas off from the controller for a while; they can still reach each other."""
        names = self._alive(*ROLES)
        chosen = [name for name in names if self.rng.random() < self.rng.choice((0.1, 0.3, 1.0))]
        late = self.rng.random() < self.faults.late if self.faults.late else False
        self.network.partition(chosen, late=late)
        if self.rng.random() >= self.faults.silent_deaths:
            for name in chosen:
                self.clock.after(0.02 * self.rng.random(), self._disconnect, name)
        longest_s = self.faults.cut_leases * self.plan.lease_s
        self.clock.after(longest_s * self.rng.random() ** 2, self.network.heal, chosen)

    def _join(self) -> None:
        self._start(self.rng.choice(self._roles))

    def _place_missing(self) -> None:
        """Have the launcher place what is desired and missing."""
        self.clock.after(PLACE_EVERY_S, self._place_missing)
        desired = self.host.desired()
        if desired is not None:
            self.launcher.look(self.replicas.values(), self._restarting, self.host.members(), desired)

    def _leave(self) -> None:
        """Have a replica leave, if its role has more than the run needs to begin."""
        plan = self.plan
        needed = dict(
            zip(ROLES, (plan.num_policies, plan.num_rollouts, plan.num_rewards, plan.num_teachers), strict=True)
        )
        role = self.rng.choice(self._roles)
        names = [name for name in self._alive(role) if name not in self._followers]
        if len(names) > needed[role]:
            self.replicas[self.rng.choice(names)].leave("it was taken out of the run")

    def _hang(self) -> None:
        """Have one of several policies hang: a single one is replaced only after the time of a whole step."""
        names = self._alive("policy")
        if len(names) > 1:
            policy = self.replicas[self.rng.choice(names)]
            assert isinstance(policy, SimulatedPolicy)
            policy.hang()

    def _preempt(self) -> None:
        """Have a rollout leave and come back, as a preempted machine does."""
        names = self._alive("rollout")
        if names:
            replica = self.replicas[self.rng.choice(names)]
            replica.leave("it is preempted")
            self.clock.after(LEAVE_TIMEOUT_S, self.restart_later, replica)

    def _stop(self) -> None:
        """Stop the run by a signal, which reaches one process: a controller that restarts meanwhile gets another."""
        self._stopped = True
        if self.host.up and self.host.incarnation != self._stopped_incarnation:
            self._stopped_incarnation = self.host.incarnation
            self.host.handle(StopRequested(self.now, "stopped"))
        self.clock.after(0.5, self._stop)
