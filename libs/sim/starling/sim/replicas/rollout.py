"""A rollout replica: the real rollout core around an engine that samples, token by token, what the seed decides."""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starling.common.ids import Role
from starling.common.wire import messages as wire
from starling.rollout.core import machine as core
from starling.sim.errors import Violation, demand
from starling.sim.replicas.replica import Buffers, SimulatedReplica
from starling.sim.replicas.weights import checked_plan, encoded_offer, offer_of
from starling.weightsync.plan.offer import decode_offer

if TYPE_CHECKING:
    from starling.sim.cluster.cluster import SimulatedCluster

LONGEST = 8
"""No completion is longer than so many times the mean."""
PULL_PATIENCE_S = 60.0
FAREWELL_S = 5.0
"""Who leaves waits no longer until the controller has what it gives back."""


@dataclass
class Sampled:
    """A group in the engine; its completions grow together."""

    message: wire.GenerateGroup
    num_tokens: int
    """Of each completion, in the end."""
    versions: list[int]
    """Of the tokens so far."""
    since: float
    """When the first of the tokens to come was begun."""
    temperatures: list[float]
    """At which each of them was drawn."""
    run: int = 0
    """How often the sampling was interrupted: what was due before is due no more."""


def length_of(seed: int, mean: float) -> int:
    """Return the length of the completions under this sampling seed: of a heavy tail (Pareto, index 3)."""
    share = (zlib.crc32(b"%d" % seed) + 1) / 2**32
    return max(1, min(round(mean * LONGEST), round(mean * 2 / 3 / math.pow(share, 1 / 3))))


class SimulatedRollout(SimulatedReplica):
    """Generates, pulls and switches as the core says; what it generates must be of proven weights."""

    role: Role = "rollout"

    def __init__(self, world: SimulatedCluster, name: str, epoch: int, num_slots: int) -> None:
        super().__init__(world, name, epoch, num_slots)
        # Without a policy it has read its weights before it says hello.
        self.core = core.RolloutMachine() if world.plan.has_policy else core.RolloutMachine(version=0)
        self.core.asleep = not self.awake
        self.engine: dict[str, Sampled] = {}
        self._weights = "nothing" if world.plan.has_policy else offer_of(0).root
        if not world.plan.has_policy:
            world.promises.adopted(name, epoch, 0)
        self._offered = -1
        self._pulling: tuple[str, float, str] | None = None
        self._asked: dict[str, tuple[wire.GenerateGroup, Buffers]] = {}
        """The groups that it was given and has not answered."""
        self.busy_s = 0.0
        """Seconds of work, of each of its slots."""
        self._leaving = ""
        """Why it is about to leave; empty when it is not."""

    @property
    def version(self) -> int:
        """The version in use."""
        return self.core.version

    @property
    def offered(self) -> int:
        """The version in use, if it was asked to serve it."""
        return self._offered

    @property
    def root(self) -> str:
        """Root of what the engine holds."""
        return self._weights

    def waits(self) -> list[wire.Wait]:
        """Return the pull that is under way."""
        if self._pulling is None:
            return []
        what, since, on = self._pulling
        waited_s = self.world.clock.now - since
        return [wire.Wait(what=what, on=on, since_s=waited_s, seconds_left=max(0.0, PULL_PATIENCE_S - waited_s))]

    def do(self, message: wire.LeasedCommand, buffers: Buffers) -> None:
        """Generate, adopt, or serve."""
        if not self.works(message.lease):
            return
        match message:
            case wire.GenerateGroup():
                self._asked[message.lease] = message, buffers
                if self._leaving or not self.awake:
                    self._give_back(message.lease)
                    return
                self._act(self.core.generate(message))
            case wire.AdoptWeights():
                self._act(self.core.adopt(message, buffers))
            case wire.PublishWeights():
                self._serve(message)
            case wire.Sleep():
                self._act(self.core.sleep(message))
            case wire.Wake():
                self._act(self.core.wake(message))
            case _:
                raise Violation(f"a rollout was sent {message}")

    def give_up(self, leases: tuple[str, ...]) -> None:
        """Take groups out of the engine."""
        for lease in leases:
            self._asked.pop(lease, None)
        self._act(self.core.given_up(leases))

    def leave(self, reason: str) -> None:
        """Give back what it has of each group, and be gone when the controller has it."""
        if self._leaving:
            return
        self._leaving = reason
        self._interrupt()
        for lease in list(self._asked):
            self._give_back(lease)
        self._depart(self.world.clock.now + FAREWELL_S)

    def dozes(self) -> None:
        """Give back what it has of each group, and sleep."""
        if self.engine:
            was_asleep, self.core.asleep = self.core.asleep, False
            self._interrupt()
            self.core.asleep = was_asleep
        for lease in list(self._asked):
            self._give_back(lease)
        self.core.asleep, self.awake = True, False

    def _give_back(self, lease: str) -> None:
        message, buffers = self._asked.pop(lease)
        sampled = self.engine.pop(lease, None) or self._sampled_of(message, buffers)
        self.core.given_up((lease,))
        self.answer(lease, *_interrupted(sampled, self._leaving or "it sleeps"))

    def _depart(self, deadline: float) -> None:
        if not self.alive:
            return
        if any(held.phase == "answered" for held in self.book.held()) and self.world.clock.now < deadline:
            self.world.clock.after(0.1, self._depart, deadline)
        else:
            super().leave(self._leaving)

    def _serve(self, message: wire.PublishWeights) -> None:
        if message.version != self.core.version:
            self.fail(message.lease, f"version {self.core.version} is in use, not version {message.version}")
            return
        self._offered = message.version
        published = wire.WeightsPublished(lease=message.lease, version=message.version, publish_s=0.0)
        self.answer(message.lease, published, (encoded_offer(message.version),))

    def _act(self, actions: list[core.Action]) -> None:
        for action in actions:
            match action:
                case core.StartGroup(message=message):
                    self.engine[message.lease] = self._sampled_of(*self._asked[message.lease])
                    self._sample(message.lease)
                case core.PullWeights(message=message, buffers=buffers):
                    self._pull(message, buffers)
                case core.SwitchWeights(lease=lease):
                    self._switch(lease)
                case core.CancelGroup(lease=lease):
                    del self.engine[lease]
                case core.FailLease(lease=lease, reason=reason):
                    self.fail(lease, reason)
                case core.FallAsleep(lease=lease):
                    self.dozes()
                    self.answer(lease, wire.Slept(lease=lease))
                case core.WakeUp(lease=lease, again=again):
                    if not self.awake:
                        self.wake()
                    if not again:
                        self._act(self.core.woken(self.core.version))
                    self.answer(lease, wire.Woken(lease=lease))

    # --- the engine ------------------------------------------------------------------------------------------------

    @property
    def _token_s(self) -> float:
        return self.world.scenario.work.token_s * self.slowness

    def _sampled_of(self, message: wire.GenerateGroup, buffers: Buffers) -> Sampled:
        """Return a group as it begins, or goes on from what another rollout has of it."""
        length = length_of(message.sampling.seed, self.world.scenario.work.tokens)
        num = message.partial[0].num_tokens if message.partial else 0
        temperatures, versions = (struct.unpack(f"<{num}{kind}", buffers[at][: 4 * num]) if num else ()
                                  for kind, at in (("f", 1), ("i", 2)))  # fmt: skip
        demand(num <= length, f"{message.prompt.id} goes on from {num} tokens and has {length}")
        return Sampled(message, length, list(versions), self.world.clock.now, list(temperatures))

    def _sample(self, lease: str) -> None:
        """Go on with a group until it is done or something interrupts it."""
        group = self.engine[lease]
        group.since, group.run = self.world.clock.now, group.run + 1
        seconds = (group.num_tokens - len(group.versions)) * self._token_s
        self.world.clock.after(seconds, self._sampled, lease, group.run)

    def _sampled(self, lease: str, run: int) -> None:
        group = self.engine.get(lease)
        if not self.alive or group is None or group.run != run or not self.core.may_generate:
            return
        self._note_tokens(group, group.num_tokens)
        del self.engine[lease], self._asked[lease]
        self.core.finished(lease)
        self.answer(lease, *_generated(group))

    def _interrupt(self) -> None:
        """Write down the tokens so far, which are of the version that is about to go."""
        for group in self.engine.values():
            group.run += 1
            if self.core.may_generate:
                num = int((self.world.clock.now - group.since) / self._token_s)
                self._note_tokens(group, min(group.num_tokens, len(group.versions) + num))

    def _note_tokens(self, group: Sampled, num_tokens: int) -> None:
        demand(self.awake, f"{self.name} samples in its sleep")
        version = self.core.version
        proven = self._weights == offer_of(version).root
        demand(proven, f"{self.name} samples with weights that are not version {version}")
        num = num_tokens - len(group.versions)
        self.world.busy_s["rollout"] += num * self._token_s
        self.busy_s += num * self._token_s
        group.versions += [version] * num
        group.temperatures += [group.message.sampling.temperature] * num

    # --- the weights -----------------------------------------------------------------------------------------------

    def _pull(self, message: wire.AdoptWeights, buffers: Buffers) -> None:
        source = message.source or "policy-0"
        self._pulling = (f"version {message.version}", self.world.clock.now, source)
        holder = self.world.replicas.get(source)
        seconds = self.takes(self.world.scenario.work.pull_s)
        self.world.clock.after(seconds, self._pulled, message, buffers, source, -1 if holder is None else holder.epoch)

    def _pulled(self, message: wire.AdoptWeights, buffers: Buffers, source: str, epoch: int) -> None:
        if not self.alive:
            return
        self._pulling = None
        offer = decode_offer(buffers[0])
        checked_plan(buffers[1], source, self.name)
        demand(offer.version == message.version, f"{self.name} adopts version {message.version} by another's offer")
        problem = self.world.pull_problem(source, epoch, message.version)
        self._act(self.core.pulled(message.lease, problem))

    def _switch(self, lease: str) -> None:
        assert self.core.adopting is not None, "a switch follows a pull"
        self._interrupt()
        version = self.core.adopting.version
        proven = self.world.rng.random() >= self.world.faults.torn
        self._weights = offer_of(version).root if proven else "torn"
        self._offered = -1
        actions = self.core.switched(lease, proven=proven)
        if proven:
            self.world.promises.adopted(self.name, self.epoch, version)
            self.answer(lease, adopted(lease, version))
            for held in self.engine:
                self._sample(held)
        self._act(actions)


def adopted(lease: str, version: int) -> wire.WeightsAdopted:
    """Return the answer of who has adopted `version`, and proves it."""
    return wire.WeightsAdopted(
        lease=lease,
        version=version,
        root=offer_of(version).root,
        pull_s=0.0,
        pause_s=0.0,
        size_bytes=16,
        transport="local",
    )


def _tensors(sampled: Sampled) -> tuple[tuple[wire.TensorMeta, ...], Buffers]:
    """Return token ids, log-probabilities and versions of all completions, which are alike."""
    num = len(sampled.versions)
    versions = struct.pack(f"<{num}i", *sampled.versions) * sampled.message.num_completions
    # What stands for the log-probabilities is what they would depend on.
    logprobs = struct.pack(f"<{num}f", *sampled.temperatures) * sampled.message.num_completions
    shape = (num * sampled.message.num_completions,)
    tensors = tuple(
        wire.TensorMeta(dtype=dtype, shape=shape, nbytes=len(versions)) for dtype in ("int32", "float32", "int32")
    )
    return tensors, (bytes(len(versions)), logprobs, versions)


def _interrupted(sampled: Sampled, reason: str) -> tuple[wire.GroupInterrupted, Buffers]:
    message, num = sampled.message, len(sampled.versions)
    tensors, buffers = _tensors(sampled)
    interrupted = wire.GroupInterrupted(
        lease=message.lease,
        reason=reason,
        partial=(wire.PartialCompletionMeta(num_tokens=num),) * message.num_completions if num else (),
        tensors=tensors if num else (),
        temperature=message.sampling.temperature,
    )
    return interrupted, buffers if num else ()


def _generated(sampled: Sampled) -> tuple[wire.GroupGenerated, Buffers]:
    message, versions = sampled.message, sampled.versions
    trajectories = tuple(
        wire.TrajectoryMeta(
            status=wire.Status.OK,
            num_tokens=len(versions),
            text=f"{message.sampling.seed}/{position}",
            oldest_version=min(versions),
            newest_version=max(versions),
        )
        for position in range(message.num_completions)
    )
    tensors, buffers = _tensors(sampled)
    prompt = struct.pack("<I", message.sampling.seed % 2**32)
    generated = wire.GroupGenerated(
        lease=message.lease,
        trajectories=trajectories,
        tensors=(wire.TensorMeta(dtype="int32", shape=(1,), nbytes=4), *tensors),
        temperature=message.sampling.temperature,
    )
    return generated, (prompt, *buffers)
