"""One incarnation of a simulated replica: the real lease table and fencing, around simulated work."""

from __future__ import annotations

import random
from typing import Final, Protocol

from starling.common.ids import Role, lease_order
from starling.common.leases.membership import MembershipLease
from starling.common.leases.table import LeaseTable
from starling.common.wire import codec
from starling.common.wire import messages as wire
from starling.controller.core.plan import RunPlan
from starling.sim.checks.guarantees import Guarantees
from starling.sim.environment.clock import SimulatedClock
from starling.sim.errors import Violation, require
from starling.sim.replicas.collective import Collective, StepItem
from starling.sim.replicas.lies import lie
from starling.sim.replicas.weights import encoded_layout, num_ranks_of
from starling.sim.scenario.faults import Faults
from starling.sim.scenario.scenario import Scenario

HELLO_EVERY_S: Final = 0.5
RESEND_S: Final = 2.0
NUM_HOSTS: Final = 8
STRAGGLER_SLOWNESS: Final = 10.0

Buffers = tuple[bytes, ...]
Frames = list[bytes | memoryview]


class Cluster(Protocol):
    """The part of the simulated cluster that its replicas use."""

    scenario: Scenario
    plan: RunPlan
    faults: Faults
    rng: random.Random
    clock: SimulatedClock
    collective: Collective
    guarantees: Guarantees
    replicas: dict[str, SimulatedReplica]
    """By name, the newest incarnation of each."""
    saved: dict[int, str]
    """Digest of each state that a policy saved, by version."""
    busy_s: dict[str, float]
    """Seconds of work by role."""
    accused: set[str]
    """Replicas that a liar had evicted."""
    num_false_pulls: int
    """Pulls that brought other weights than were published."""

    def to_controller(self, name: str, frames: Frames) -> None:
        """Send the message of a replica to the controller."""

    def pull_problem(self, source: str, incarnation: int, version: int) -> str | None:
        """Return why `version` could not be pulled from this incarnation of `source`, or None if it was."""

    def sent_by(self, source: str, version: int) -> bytes:
        """Return the bytes of `version` as `source` sends them: others, if it lies."""

    def record_step(self, items: dict[str, StepItem]) -> None:
        """Record a step of reinforcement learning that was made for the first time."""

    def restart_later(self, replica: SimulatedReplica) -> None:
        """Restart a replica that has ended, after a random delay, as a supervisor does."""


class SimulatedReplica:
    """Sends hello and heartbeats, executes each command once, and repeats answers until their leases are released."""

    role: Role

    def __init__(self, cluster: Cluster, name: str, incarnation: int, num_slots: int = 0) -> None:
        """Make the `incarnation`-th process of this name, counted from 1."""
        self.cluster, self.name, self.incarnation, self.num_slots = cluster, name, incarnation, num_slots
        self.alive, self.welcomed = True, False
        self.leases = LeaseTable(resend_s=RESEND_S)
        rng = cluster.rng
        typical = 0.8 + 0.4 * rng.random()
        self.slowness = typical * (STRAGGLER_SLOWNESS if rng.random() < cluster.faults.stragglers else 1.0)
        """Factor on the duration of its work."""
        self.lies = 0.0
        """Share of its messages that are false."""
        self.forges_weights = False
        """It sends other weights to rollouts that pull from it than were published."""
        self.awake = not cluster.plan.colocate
        """It holds its devices. Where these are shared, a replica starts without them."""
        self.membership = MembershipLease(f"{name}/{incarnation}/")
        self._newest_order = (0, 0)
        """The newest command to sleep or to wake."""
        self._seq = 0
        self._controller_incarnation = 0
        """The newest incarnation of the controller that was heard."""

    def begin(self) -> None:
        """Send the first hello, and from then on hello or heartbeats at their interval."""
        if not self.alive:
            return
        now = self.cluster.clock.now
        if self.awake and self.membership.must_exit(self.role, now):
            self.die()
            self.cluster.restart_later(self)
            return
        if self.awake and not self.is_in_step and not self.membership.is_valid(now):
            # Without the controller it cannot know which side may use the shared devices now.
            self.awake = self.welcomed = False
            self.fall_asleep()
        self.membership.sent(self._seq + 1, now)
        if self.welcomed:
            waits = tuple(self.current_waits())
            self.send(
                wire.Heartbeat(leases=self.leases.held(), version=self.version, offered=self.offered, waits=waits)
            )
            for message, buffers in self.leases.due(now):
                self.send(message, buffers)
        else:
            self._send_hello()
        self.cluster.clock.after(self.cluster.plan.heartbeat_s if self.welcomed else HELLO_EVERY_S, self.begin)

    def _send_hello(self) -> None:
        has_layout = self.role in ("policy", "rollout")
        # Rollouts of one host pull from each other: also from the one that lies.
        is_near = self.role == "rollout" and self.cluster.faults.lies
        hello = wire.Hello(
            role=self.role,
            host="host-of-liars" if is_near else f"host-{sum(self.name.encode()) % NUM_HOSTS}",
            pid=1,
            num_slots=self.num_slots,
            version=self.version,
            has_layout=has_layout,
            serves=has_layout,
            peer=self.name if self.role == "policy" else "",
        )
        self.send(hello, (encoded_layout(self.name, num_ranks=num_ranks_of(self.name)),) if has_layout else ())

    def send(self, message: wire.Up, buffers: Buffers = ()) -> None:
        """Send a message to the controller."""
        if self.lies and self.cluster.rng.random() < self.lies:
            message, buffers = lie(message, buffers, self.cluster.rng)
        self._seq += 1
        envelope = wire.Envelope(
            protocol=wire.PROTOCOL_VERSION, run="r", sender=self.name, incarnation=self.incarnation, seq=self._seq
        )
        self.cluster.to_controller(self.name, codec.pack(envelope, message, buffers))

    def receive(self, envelope: wire.Envelope, message: wire.Down, frames: Frames) -> None:
        """Handle a message of the controller, as `starling.common.net.link` does."""
        if not self.alive or envelope.incarnation < self._controller_incarnation:
            return
        self._controller_incarnation = envelope.incarnation
        match message:
            case wire.Welcome():
                self.welcomed = True
                self.membership.welcomed(envelope.cause, message, self.leases, self.cluster.clock.now)
            case wire.RequestHello():
                self.welcomed = False
            case wire.Refused(reason=reason):
                self.on_refused(reason)
            case wire.Drain():
                self.leave("drained")
            case wire.ReleaseLeases(leases=leases):
                unanswered = tuple(self.leases.release(leases))
                if unanswered:
                    self.cancel(unanswered)
            case wire.Profile():
                pass  # nothing runs here that could be profiled
            case wire.OperatorReply():
                raise Violation(f"{self.name} is not an operator and was sent the reply {message.text!r}")
            case wire.RoleSettings():
                raise Violation(f"{self.name} asked for no settings and was sent some")
            case _:
                if isinstance(message, wire.Sleep | wire.Wake) and not self._is_newest_order(message.lease):
                    return
                if self.leases.grant(message.lease):
                    self.execute(message, tuple(bytes(frame) for frame in frames[2:]))
                else:
                    self.leases.resend(message.lease)

    def _is_newest_order(self, lease: str) -> bool:
        """Return False for a command to sleep or to wake that a later one has replaced; duplicates arrive late."""
        order = lease_order(lease)
        self._newest_order, before = max(order, self._newest_order), self._newest_order
        return order >= before

    def leave(self, reason: str) -> None:
        """Leave the cluster with a message."""
        self.send(wire.Leave(reason=reason))
        self.die()

    def die(self) -> None:
        """End without a message."""
        self.alive = False

    def on_refused(self, reason: str) -> None:
        """The controller refused the membership of this replica. One that lies is started again.

        One that a liar accuses of having sent other weights is, too: once in a run.
        """
        if "than were published" in reason and self.cluster.faults.lies and not (self.lies or self.forges_weights):
            require(
                self.name not in self.cluster.accused, f"{self.name} was evicted twice on the word of others: {reason}"
            )
            self.cluster.accused.add(self.name)
            self.die()
            self.cluster.restart_later(self)
            return
        if self.lies or self.forges_weights:
            self.die()
            self.cluster.restart_later(self)
            return
        raise Violation(f"{self.name} was refused: {reason}")

    def answer(self, lease: str, message: wire.Up, buffers: Buffers = ()) -> None:
        """Send a result, and keep it until the lease is released."""
        if self.alive and self.leases.answer(lease, message, buffers, self.cluster.clock.now):
            self.send(message, buffers)

    def begin_work(self, lease: str) -> bool:
        """Mark a lease as being worked on; False if it was released, as in `starling.common.net.link`."""
        if self.membership.forbids(lease, self.cluster.clock.now):
            self.leases.release((lease,))
        return self.leases.work(lease)

    def fail(self, lease: str, reason: str) -> None:
        """Report that the work of a lease cannot be done."""
        version = self.version if self.role == "policy" else -1
        infra_lost = wire.Status.INFRA_LOST
        self.answer(lease, wire.LeaseFailed(lease=lease, status=infra_lost, reason=reason, version=version))

    def sample_duration(self, seconds: float) -> float:
        """Return a random duration for work that takes `seconds` on a typical replica."""
        return seconds * self.slowness * (0.5 + self.cluster.rng.random())

    @property
    def version(self) -> int:
        """The weight version that heartbeats report."""
        return -1

    @property
    def offered(self) -> int:
        """The newest version that this replica has on offer."""
        return -1

    @property
    def root(self) -> str:
        """Root digest of the weights that this replica holds."""
        return ""

    def current_waits(self) -> list[wire.Wait]:
        """Return what this replica waits for now."""
        return []

    def execute(self, message: wire.LeasedCommand, buffers: Buffers) -> None:
        """Begin the work of a command that was not received before."""
        raise NotImplementedError

    @property
    def is_in_step(self) -> bool:
        """Return whether it does work that cannot be interrupted."""
        return False

    def fall_asleep(self) -> None:
        """Give up the devices because the controller cannot be heard."""

    def wake(self) -> None:
        """Take the devices. Raises Violation if a replica of the other side holds them."""
        others = {"policy", "rollout"} - {self.role}
        for other in self.cluster.replicas.values():
            clash = other.alive and other.awake and other.role in others
            require(not clash, f"{self.name} wakes while {other.name} is awake")
        self.awake = True

    def cancel(self, leases: tuple[str, ...]) -> None:
        """Drop the unfinished work of these leases."""
