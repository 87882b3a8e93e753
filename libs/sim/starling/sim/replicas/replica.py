"""One incarnation of a replica as the controller sees it: the real lease book, and simulated work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from starling.common.ids import Role, lease_order
from starling.common.leases import LeaseTable
from starling.common.membership import MembershipLease
from starling.common.wire import codec
from starling.common.wire import messages as wire
from starling.sim.errors import Violation, demand
from starling.sim.replicas.weights import encoded_layout

if TYPE_CHECKING:
    from starling.sim.cluster.cluster import SimulatedCluster

HELLO_EVERY_S: Final = 0.5
RESEND_S: Final = 2.0
NUM_HOSTS: Final = 8
STRAGGLE: Final = 10.0

Buffers = tuple[bytes, ...]
Frames = list[bytes | memoryview]


class SimulatedReplica:
    """Says hello and heartbeats, does each command once, and repeats answers until they are released."""

    role: Role

    def __init__(self, world: SimulatedCluster, name: str, epoch: int, num_slots: int = 0) -> None:
        """`epoch` counts the incarnations of this name."""
        self.world, self.name, self.epoch, self.num_slots = world, name, epoch, num_slots
        self.alive, self.welcomed = True, False
        self.book = LeaseTable(resend_s=RESEND_S)
        rng = world.rng
        self.slowness = (0.8 + 0.4 * rng.random()) * (STRAGGLE if rng.random() < world.faults.stragglers else 1.0)
        """How many times as long as usual its work takes."""
        self.awake = not world.plan.colocate
        """It has its devices; where these are shared, a replica loads beside them."""
        self.standing = MembershipLease(f"{name}/{epoch}/")
        self._turned = (0, 0)
        """The newest order to sleep or to wake."""
        self._seq = 0
        self._incarnation = 0
        """Of the newest controller heard."""

    def begin(self) -> None:
        """Speak, and again when it is time."""
        if not self.alive:
            return
        now = self.world.clock.now
        if self.awake and self.standing.is_over(self.role, now):
            self.die()
            self.world.start_again(self)
            return
        if self.awake and not self.is_in_step and not self.standing.holds(now):
            # Whoever has lost the controller cannot know whose turn it is.
            self.awake = self.welcomed = False
            self.dozes()
        self.standing.says(self._seq + 1, now)
        if self.welcomed:
            self.say(
                wire.Heartbeat(
                    leases=self.book.held(), version=self.version, offered=self.offered, waits=tuple(self.waits())
                )
            )
            for message, buffers in self.book.due(now):
                self.say(message, buffers)
        else:
            self._say_hello()
        self.world.clock.after(self.world.plan.heartbeat_s if self.welcomed else HELLO_EVERY_S, self.begin)

    def _say_hello(self) -> None:
        has_layout = self.role in ("policy", "rollout")
        hello = wire.Hello(
            role=self.role,
            host=f"host-{sum(self.name.encode()) % NUM_HOSTS}",
            pid=1,
            num_slots=self.num_slots,
            version=self.version,
            has_layout=has_layout,
            serves=has_layout,
            shares_steps=self.role == "policy",
        )
        self.say(hello, (encoded_layout(self.name),) if has_layout else ())

    def say(self, message: wire.Up, buffers: Buffers = ()) -> None:
        """Send to the controller."""
        self._seq += 1
        envelope = wire.Envelope(
            protocol=wire.PROTOCOL_VERSION, run="r", sender=self.name, incarnation=self.epoch, seq=self._seq
        )
        self.world.to_controller(self.name, codec.pack(envelope, message, buffers))

    def hear(self, envelope: wire.Envelope, message: wire.Down, frames: Frames) -> None:
        """Take in what the controller says, as `starling.common.net.link` does."""
        if not self.alive or envelope.incarnation < self._incarnation:
            return
        self._incarnation = envelope.incarnation
        match message:
            case wire.Welcome():
                self.welcomed = True
                self.standing.answered(envelope.cause, message, self.book, self.world.clock.now)
            case wire.RequestHello():
                self.welcomed = False
            case wire.Refused(reason=reason):
                self.refused(reason)
            case wire.Drain():
                self.leave("drained")
            case wire.ReleaseLeases(leases=leases):
                given_up = tuple(self.book.release(leases))
                if given_up:
                    self.give_up(given_up)
            case wire.OperatorReply():
                raise Violation(f"{self.name} is no operator, and was told {message.text}")
            case _:
                if isinstance(message, wire.Sleep | wire.Wake) and not self._is_new(message.lease):
                    return
                if self.book.grant(message.lease):
                    self.do(message, tuple(bytes(frame) for frame in frames[2:]))
                else:
                    self.book.resend(message.lease)

    def _is_new(self, lease: str) -> bool:
        """Say whether no later order to sleep or to wake was heard; a line that doubles messages gives old ones."""
        order = lease_order(lease)
        self._turned, before = max(order, self._turned), self._turned
        return order >= before

    def leave(self, reason: str) -> None:
        """Say farewell and be gone."""
        self.say(wire.Leave(reason=reason))
        self.die()

    def die(self) -> None:
        """Be gone, without a word."""
        self.alive = False

    def refused(self, reason: str) -> None:
        """It may not be a member."""
        raise Violation(f"{self.name} was refused: {reason}")

    def answer(self, lease: str, message: wire.Up, buffers: Buffers = ()) -> None:
        """Send a result, and keep it until the lease is released."""
        if self.alive and self.book.answer(lease, message, buffers, self.world.clock.now):
            self.say(message, buffers)

    def works(self, lease: str) -> bool:
        """Take up a lease; False when it is wanted no longer, as in `starling.common.net.link`."""
        if self.standing.forbids(lease, self.world.clock.now):
            self.book.release((lease,))
        return self.book.work(lease)

    def fail(self, lease: str, reason: str) -> None:
        """Say that a lease cannot be met."""
        version = self.version if self.role == "policy" else -1
        infra_lost = wire.Status.INFRA_LOST
        self.answer(lease, wire.LeaseFailed(lease=lease, status=infra_lost, reason=reason, version=version))

    def takes(self, seconds: float) -> float:
        """Return how long it takes to do what usually takes `seconds`."""
        return seconds * self.slowness * (0.5 + self.world.rng.random())

    @property
    def version(self) -> int:
        """The weight version that the heartbeat tells."""
        return -1

    @property
    def offered(self) -> int:
        """The newest version that it has on offer."""
        return -1

    @property
    def root(self) -> str:
        """What proves the weights that it really holds."""
        return ""

    def waits(self) -> list[wire.Wait]:
        """Return what it waits for now."""
        return []

    def do(self, message: wire.LeasedCommand, buffers: Buffers) -> None:
        """Begin a new piece of work."""
        raise NotImplementedError

    @property
    def is_in_step(self) -> bool:
        """Say whether it does something now that it cannot break off."""
        return False

    def dozes(self) -> None:
        """Fall asleep for want of the controller."""

    def wake(self) -> None:
        """Take the devices."""
        others = {"policy", "rollout"} - {self.role}
        for other in self.world.replicas.values():
            clash = other.alive and other.awake and other.role in others
            demand(not clash, f"{self.name} wakes beside {other.name}, which is awake")
        self.awake = True

    def give_up(self, leases: tuple[str, ...]) -> None:
        """Forget unfinished work."""
