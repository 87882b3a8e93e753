"""Replicas as the controller sees them: the real lease book, the real rollout core, and simulated work."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

from simulated_checks import Violation, demand
from tiny_weights import encoded_layout, encoded_offer, layout_of, offer_of

from starling.common.ids import Role
from starling.common.leases import LeaseBook
from starling.common.wire import codec
from starling.common.wire import messages as wire
from starling.policy.core.progress import Progress
from starling.rollout.core import rollout as core
from starling.weightsync.layout import pieces_of
from starling.weightsync.offer import decode_offer
from starling.weightsync.plan import check_plan, decode_plan

if TYPE_CHECKING:
    from simulated import World

HELLO_EVERY_S = 0.5
RESEND_S = 2.0
TOKEN_S = 0.05
PolicyWork = wire.TrainStep | wire.PublishWeights | wire.SaveCheckpoint


class Replica:
    """One incarnation: says hello and heartbeats, does each command once, and repeats answers until released."""

    role: Role

    def __init__(self, world: World, name: str, epoch: int, num_slots: int = 0) -> None:
        self.world, self.name, self.epoch, self.num_slots = world, name, epoch, num_slots
        self.alive, self.welcomed = True, False
        self.book = LeaseBook(resend_s=RESEND_S)
        self._seq = 0

    def begin(self) -> None:
        """Speak, and again when it is time."""
        if not self.alive:
            return
        plan = self.world.plan
        if self.welcomed:
            self.say(wire.Heartbeat(leases=self.book.held(), version=self.version))
            for message, buffers in self.book.due(self.world.now):
                self.say(message, buffers)
        else:
            has_layout = self.role != "reward"
            hello = wire.Hello(
                role=self.role,
                host="here",
                pid=1,
                num_slots=self.num_slots,
                version=self.version,
                has_layout=has_layout,
            )
            self.say(hello, (encoded_layout(self.name),) if has_layout else ())
        self.world.after(plan.heartbeat_s if self.welcomed else HELLO_EVERY_S, self.begin)

    def say(self, message: wire.Up, buffers: tuple[bytes, ...] = ()) -> None:
        """Send to the controller."""
        self._seq += 1
        envelope = wire.Envelope(
            protocol=wire.PROTOCOL_VERSION, run="r", sender=self.name, epoch=self.epoch, seq=self._seq
        )
        self.world.to_controller(self, codec.pack(envelope, message, buffers))

    def hear(self, frames: list[bytes | memoryview]) -> None:
        """Take in what the controller says, as `starling.common.net.link` does."""
        if not self.alive:
            return
        message, buffers = codec.unpack_down(frames), tuple(bytes(frame) for frame in frames[2:])
        match message:
            case wire.Welcome():
                self.welcomed = True
            case wire.Introduce():
                self.welcomed = False
            case wire.Refused(reason=reason):
                raise Violation(f"{self.name} was refused: {reason}")
            case wire.Drain():
                self.say(wire.Leave(reason="drained"))
                self.alive = False
            case wire.Release(leases=leases):
                self.give_up(tuple(self.book.release(leases)))
            case _:
                if self.book.grant(message.lease):
                    self.do(message, buffers)
                else:
                    self.book.resend(message.lease)

    def answer(self, lease: str, message: wire.Up, buffers: tuple[bytes, ...] = ()) -> None:
        """Send a result, and keep it until the lease is released."""
        if self.book.answer(lease, message, buffers, self.world.now):
            self.say(message, buffers)

    def fail(self, lease: str, reason: str) -> None:
        """Say that a lease cannot be met."""
        self.answer(lease, wire.LeaseFailed(lease=lease, status=wire.Status.INFRA_LOST, reason=reason))

    @property
    def version(self) -> int:
        """The weight version that the heartbeat tells."""
        return -1

    def do(self, message: wire.Work, buffers: tuple[bytes, ...]) -> None:
        """Begin a new piece of work."""
        raise NotImplementedError

    def give_up(self, leases: tuple[str, ...]) -> None:
        """Forget unfinished work."""


class Policy(Replica):
    """Does one piece of work at a time; digests of a snapshot follow beside it. What it is given must keep the promises
    of the run."""

    role = "policy"

    def __init__(self, world: World, name: str, epoch: int) -> None:
        super().__init__(world, name, epoch)
        self.progress = Progress()
        self.todo: list[tuple[PolicyWork, tuple[bytes, ...]]] = []
        self.num_overlaps = 0
        """Steps that began before the version that they start from was offered."""
        self._offered = -1
        self._busy = False

    @property
    def version(self) -> int:
        return self.progress.version

    def do(self, message: wire.Work, buffers: tuple[bytes, ...]) -> None:
        assert isinstance(message, PolicyWork)
        self.todo.append((message, buffers))
        self._take()

    def _take(self) -> None:
        ready = next((work for work in self.todo if not self.progress.must_wait(work[0])), None)
        if ready is None or self._busy:
            return
        self._busy = True
        self.todo.remove(ready)
        self._later(lambda: self._work(*ready))

    def _later(self, action: Callable[[], None]) -> None:
        self.world.after(0.05 + 0.3 * self.world.rng.random(), lambda: action() if self.alive else None)

    def _work(self, message: PolicyWork, buffers: tuple[bytes, ...]) -> None:
        if self.book.work(message.lease):
            self._carry_out(message, buffers)
        self._busy = False
        self._take()

    def _carry_out(self, message: PolicyWork, buffers: tuple[bytes, ...]) -> None:
        objection = self.progress.objection(message)
        if objection is not None:
            self.fail(message.lease, objection)
            return
        match message:
            case wire.TrainStep(lease=lease, step=step):
                self.world.checks.trained(message, buffers)
                demand(not message.groups or self.progress.published == step - 1, f"version {step - 1} has no snapshot")
                self.num_overlaps += bool(message.groups) and self._offered < step - 1
                self.progress.version = step
                self.answer(lease, wire.StepTrained(lease=lease, step=step, metrics={}))
            case wire.PublishWeights(lease=lease, version=version):
                self.progress.published = version
                self._later(lambda: self._offer(lease, version))
            case wire.SaveCheckpoint(lease=lease, step=step):
                self.answer(lease, wire.CheckpointSaved(lease=lease, step=step, path="/"))

    def _offer(self, lease: str, version: int) -> None:
        self._offered = version
        published = wire.WeightsPublished(lease=lease, version=version, publish_s=0.0)
        self.answer(lease, published, (encoded_offer(version),))


class Reward(Replica):
    """Scores every group after a while, or fails to."""

    role = "reward"

    def do(self, message: wire.Work, buffers: tuple[bytes, ...]) -> None:
        assert isinstance(message, wire.ScoreGroup)
        faults, rng = self.world.faults, self.world.rng
        num, failed = len(message.completions), rng.random() < faults.scorer_failures
        scored = wire.GroupScored(
            lease=message.lease,
            rewards=(None if failed else 1.0,) * num,
            statuses=(wire.Status.REWARD_ERROR if failed else wire.Status.OK,) * num,
        )
        self.book.work(message.lease)
        self.world.after(faults.score_s * (0.5 + rng.random()), lambda: self.answer(message.lease, scored))


class Rollout(Replica):
    """The real rollout core around an engine that samples one token for every group at a time."""

    role = "rollout"

    def __init__(self, world: World, name: str, epoch: int, num_slots: int) -> None:
        super().__init__(world, name, epoch, num_slots)
        self.core = core.Rollout()
        self.engine: dict[str, tuple[wire.GenerateGroup, list[int]]] = {}
        self.weights = "nothing"
        """Root of what the engine holds."""
        self._busy = False

    @property
    def version(self) -> int:
        return self.core.version

    def do(self, message: wire.Work, buffers: tuple[bytes, ...]) -> None:
        self.book.work(message.lease)
        match message:
            case wire.GenerateGroup():
                self._act(self.core.generate(message))
            case wire.AdoptWeights():
                self._act(self.core.adopt(message, buffers))
            case _:
                raise Violation(f"a rollout was sent {message}")

    def give_up(self, leases: tuple[str, ...]) -> None:
        self._act(self.core.given_up(leases))

    def _act(self, actions: list[core.Action]) -> None:
        for action in actions:
            match action:
                case core.Generate(message=message):
                    self.engine[message.lease] = (message, [])
                case core.Pull(message=message, buffers=buffers):
                    seconds = self.world.faults.slow_pull_s * (0.2 + self.world.rng.random())
                    self.world.after(seconds, lambda message=message, buffers=buffers: self._pulled(message, buffers))
                case core.Switch(lease=lease):
                    self._switch(lease)
                case core.Forget(lease=lease):
                    del self.engine[lease]
                case core.Fail(lease=lease, reason=reason):
                    self.fail(lease, reason)
        if self.core.may_generate and not self._busy:
            self._busy = True
            self.world.after(TOKEN_S, self._sample)

    def _sample(self) -> None:
        self._busy = False
        if not self.alive or not self.core.may_generate:
            return
        if self.weights != offer_of(self.core.version).root:
            raise Violation(f"{self.name} samples with weights that are not version {self.core.version}")
        for lease, (message, versions) in list(self.engine.items()):
            versions.append(self.core.version)
            if len(versions) == 2 + message.sampling.seed % 4:
                del self.engine[lease]
                self.core.finished(lease)
                self.answer(lease, *_generated(message, versions))
        self._act([])

    def _pulled(self, message: wire.AdoptWeights, buffers: tuple[bytes, ...]) -> None:
        if not self.alive:
            return
        offer, plan = decode_offer(buffers[0]), decode_plan(buffers[1])
        layout = layout_of(self.name)
        check_plan(plan, {rank.rank: pieces_of(layout_of("policy-0"), rank.rank) for rank in offer.ranks}, layout, 0)
        policy = self.world.replicas["policy-0"]
        assert isinstance(policy, Policy)
        gone = policy.progress.published > offer.version
        problem = "it is gone" if gone or self.world.rng.random() < self.world.faults.pull_failures else None
        self._act(self.core.pulled(message.lease, problem))

    def _switch(self, lease: str) -> None:
        assert self.core.adopting is not None
        version = self.core.adopting.version
        proven = self.world.rng.random() >= self.world.faults.torn
        self.weights = offer_of(version).root if proven else "torn"
        actions = self.core.switched(lease, proven=proven)
        if proven:
            adopted = wire.WeightsAdopted(
                lease=lease,
                version=version,
                root=self.weights,
                pull_s=0.0,
                pause_s=0.0,
                size_bytes=16,
                transport="local",
            )
            self.answer(lease, adopted)
        self._act(actions)


def _generated(message: wire.GenerateGroup, versions: list[int]) -> tuple[wire.GroupGenerated, tuple[bytes, ...]]:
    num = message.num_completions
    meta = wire.TrajectoryMeta(
        status=wire.Status.OK,
        num_tokens=len(versions),
        text="y",
        oldest_version=min(versions),
        newest_version=max(versions),
    )
    tokens = struct.pack(f"<{len(versions)}i", *versions) * num
    shape = (len(versions) * num,)
    tensors = (
        wire.TensorMeta(dtype="int32", shape=(1,), nbytes=4),
        wire.TensorMeta(dtype="int32", shape=shape, nbytes=len(tokens)),
        wire.TensorMeta(dtype="float32", shape=shape, nbytes=len(tokens)),
        wire.TensorMeta(dtype="int32", shape=shape, nbytes=len(tokens)),
    )
    generated = wire.GroupGenerated(lease=message.lease, trajectories=(meta,) * num, tensors=tensors)
    return generated, (b"\0" * 4, bytes(len(tokens)), bytes(len(tokens)), tokens)
