"""A rollout replica: the real rollout core around an engine that samples, token by token, what the seed decides."""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starling.common.ids import Role
from starling.common.wire import messages as wire
from starling.rollout.core import rollout as core
from starling.sim.errors import Violation, demand
from starling.sim.replica import Buffers, Replica
from starling.sim.weights import checked_plan, encoded_offer, offer_of
from starling.weightsync.offer import decode_offer

if TYPE_CHECKING:
    from starling.sim.world import World

LONGEST = 8
"""No completion is longer than so many times the mean."""
PULL_PATIENCE_S = 60.0


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
    run: int = 0
    """How often the sampling was interrupted: what was due before is due no more."""


def length_of(seed: int, mean: float) -> int:
    """Return the length of the completions under this sampling seed: of a heavy tail (Pareto, index 3)."""
    share = (zlib.crc32(b"%d" % seed) + 1) / 2**32
    return max(1, min(round(mean * LONGEST), round(mean * 2 / 3 / math.pow(share, 1 / 3))))


class Rollout(Replica):
    """Generates, pulls and switches as the core says; what it generates must be of proven weights."""

    role: Role = "rollout"

    def __init__(self, world: World, name: str, epoch: int, num_slots: int) -> None:
        super().__init__(world, name, epoch, num_slots)
        self.core = core.Rollout()
        self.engine: dict[str, Sampled] = {}
        self._weights = "nothing"
        self._offered = -1
        self._pulling: tuple[str, float, str] | None = None

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

    def do(self, message: wire.Work, buffers: Buffers) -> None:
        """Generate, adopt, or serve."""
        self.book.work(message.lease)
        match message:
            case wire.GenerateGroup():
                self._act(self.core.generate(message))
            case wire.AdoptWeights():
                self._act(self.core.adopt(message, buffers))
            case wire.PublishWeights():
                self._serve(message)
            case _:
                raise Violation(f"a rollout was sent {message}")

    def give_up(self, leases: tuple[str, ...]) -> None:
        """Take groups out of the engine."""
        self._act(self.core.given_up(leases))

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
                case core.Generate(message=message):
                    length = length_of(message.sampling.seed, self.world.scenario.work.tokens)
                    self.engine[message.lease] = Sampled(message, length, [], self.world.clock.now)
                    self._sample(message.lease)
                case core.Pull(message=message, buffers=buffers):
                    self._pull(message, buffers)
                case core.Switch(lease=lease):
                    self._switch(lease)
                case core.Forget(lease=lease):
                    del self.engine[lease]
                case core.Fail(lease=lease, reason=reason):
                    self.fail(lease, reason)

    # --- the engine ------------------------------------------------------------------------------------------------

    @property
    def _token_s(self) -> float:
        return self.world.scenario.work.token_s * self.slowness

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
        del self.engine[lease]
        self.core.finished(lease)
        self.answer(lease, *_generated(group.message, group.versions))

    def _interrupt(self) -> None:
        """Write down the tokens so far, which are of the version that is about to go."""
        for group in self.engine.values():
            group.run += 1
            if self.core.may_generate:
                num = int((self.world.clock.now - group.since) / self._token_s)
                self._note_tokens(group, min(group.num_tokens, len(group.versions) + num))

    def _note_tokens(self, group: Sampled, num_tokens: int) -> None:
        version = self.core.version
        proven = self._weights == offer_of(version).root
        demand(proven, f"{self.name} samples with weights that are not version {version}")
        self.world.busy_s["rollout"] += (num_tokens - len(group.versions)) * self._token_s
        group.versions += [version] * (num_tokens - len(group.versions))

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


def _generated(message: wire.GenerateGroup, versions: list[int]) -> tuple[wire.GroupGenerated, Buffers]:
    num = message.num_completions
    trajectories = tuple(
        wire.TrajectoryMeta(
            status=wire.Status.OK,
            num_tokens=len(versions),
            text=f"{message.sampling.seed}/{position}",
            oldest_version=min(versions),
            newest_version=max(versions),
        )
        for position in range(num)
    )
    tokens = struct.pack(f"<{len(versions)}i", *versions) * num
    shape = (len(versions) * num,)
    tensors = (
        wire.TensorMeta(dtype="int32", shape=(1,), nbytes=4),
        wire.TensorMeta(dtype="int32", shape=shape, nbytes=len(tokens)),
        wire.TensorMeta(dtype="float32", shape=shape, nbytes=len(tokens)),
        wire.TensorMeta(dtype="int32", shape=shape, nbytes=len(tokens)),
    )
    prompt = struct.pack("<I", message.sampling.seed % 2**32)
    # What stands for the log-probabilities is what they would depend on.
    logprobs = struct.pack("<f", message.sampling.temperature) * len(versions) * num
    generated = wire.GroupGenerated(
        lease=message.lease, trajectories=trajectories, tensors=tensors, temperature=message.sampling.temperature
    )
    return generated, (prompt, bytes(len(tokens)), logprobs, tokens)
