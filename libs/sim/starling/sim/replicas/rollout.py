"""Simulated rollout: the real rollout core around an engine whose lengths and durations follow from the seed."""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass

from starling.common.ids import Role
from starling.common.wire import messages as wire
from starling.rollout.core import machine as core
from starling.sim.errors import Violation, require
from starling.sim.replicas.replica import Buffers, Cluster, SimulatedReplica
from starling.sim.replicas.weights import (
    FLIPPED,
    adopted,
    checked_plan,
    content_of,
    encoded_offer,
    encoded_relay_offer,
    num_ranks_of,
)
from starling.weightsync.offers.offer import decode_offer, digest_of

MAX_OVER_MEAN = 8
"""Longest completion, in units of the mean length."""
PULL_TIMEOUT_S = 60.0
NO_RELAY_SHARE = 0.1
"""Share of the pulls that a rollout should serve to others and does not."""
LEAVE_TIMEOUT_S = 5.0
"""A rollout that leaves waits at most this long until the controller has its partial completions."""


@dataclass
class EngineGroup:
    """A group in the engine. All its completions have the same length and advance together."""

    message: wire.GenerateGroup
    num_tokens: int
    """Final length of each completion."""
    versions: list[int]
    """Weight version of each token so far."""
    since: float
    """When the next token was begun."""
    temperatures: list[float]
    """Sampling temperature of each token so far."""
    schedule_number: int = 0
    """An end that was scheduled under an earlier number is void: an interruption came between."""


def length_of(seed: int, mean: float) -> int:
    """Return the length of the completions under a sampling seed, which has a heavy tail (Pareto, index 3)."""
    share = (zlib.crc32(b"%d" % seed) + 1) / 2**32
    return max(1, min(round(mean * MAX_OVER_MEAN), round(mean * 2 / 3 / math.pow(share, 1 / 3))))


class SimulatedRollout(SimulatedReplica):
    """Generates, pulls and switches as its core decides. All tokens must come from weights that were proven."""

    role: Role = "rollout"

    def __init__(self, cluster: Cluster, name: str, incarnation: int, num_slots: int) -> None:
        super().__init__(cluster, name, incarnation, num_slots)
        # Without a policy a rollout loads its weights before its first hello.
        pulls = cluster.plan.kind.trains or cluster.plan.fans_out
        self.core = core.RolloutMachine() if pulls else core.RolloutMachine(version=0)
        self.core.asleep = not self.awake
        self.engine: dict[str, EngineGroup] = {}
        self.content = b"nothing" if pulls else content_of(0)
        """Bytes of the engine's weights."""
        self._pulled_content = b""
        if not pulls:
            cluster.guarantees.on_adopted(name, incarnation, 0)
        self._offered = -1
        self._current_pull: tuple[str, float, str] | None = None
        """The pull in progress: its name, when it began, and from which replica."""
        self._pulled_buffers: Buffers = ()
        self._relayed: wire.AdoptWeights | None = None
        """The pull that this replica serves to others while it lasts, and afterwards."""
        self._pulling_since = 0.0
        """When the last pull began, in a snapshot of its own."""
        self._commands: dict[str, tuple[wire.GenerateGroup, Buffers]] = {}
        """The groups that are not answered yet, by lease."""
        self.busy_s = 0.0
        """Seconds of work, summed over the slots."""
        self._leaving = ""
        """Reason for leaving; empty while it stays."""

    @property
    def version(self) -> int:
        """The version in use."""
        return self.core.version

    @property
    def offered(self) -> int:
        """The version in use, if the controller had it offered to other rollouts."""
        return self._offered

    @property
    def root(self) -> str:
        """Root digest of the engine's weights."""
        return digest_of(self.content)

    def current_waits(self) -> list[wire.Wait]:
        """Return the pull in progress, if there is one."""
        if self._current_pull is None:
            return []
        what, since, on = self._current_pull
        waited_s = self.cluster.clock.now - since
        return [wire.Wait(what=what, on=on, since_s=waited_s, seconds_left=max(0.0, PULL_TIMEOUT_S - waited_s))]

    def execute(self, message: wire.LeasedCommand, buffers: Buffers) -> None:
        """Generate, adopt weights, offer weights, sleep or wake."""
        if not self.begin_work(message.lease):
            return
        match message:
            case wire.GenerateGroup():
                self._commands[message.lease] = message, buffers
                if self._leaving or not self.awake:
                    self._return_partial(message.lease)
                    return
                self._apply(self.core.generate(message))
            case wire.AdoptWeights():
                self._apply(self.core.adopt(message, buffers))
            case wire.PublishWeights():
                self._offer(message)
            case wire.Sleep():
                self._apply(self.core.sleep(message))
            case wire.Wake():
                self._apply(self.core.wake(message))
            case _:
                raise Violation(f"a rollout was sent {message}")

    def cancel(self, leases: tuple[str, ...]) -> None:
        """Remove groups from the engine."""
        for lease in leases:
            self._commands.pop(lease, None)
        self._apply(self.core.cancelled(leases))

    def leave(self, reason: str) -> None:
        """Return the partial completions of each group, and leave when the controller has them."""
        if self._leaving:
            return
        self._leaving = reason
        self._interrupt()
        for lease in list(self._commands):
            self._return_partial(lease)
        self._depart(self.cluster.clock.now + LEAVE_TIMEOUT_S)

    def fall_asleep(self) -> None:
        """Return the partial completions of each group, and sleep."""
        if self.engine:
            was_asleep, self.core.asleep = self.core.asleep, False
            self._interrupt()
            self.core.asleep = was_asleep
        for lease in list(self._commands):
            self._return_partial(lease)
        self.core.asleep, self.awake = True, False

    def _return_partial(self, lease: str) -> None:
        message, buffers = self._commands.pop(lease)
        group = self.engine.pop(lease, None) or self._engine_group(message, buffers)
        self.core.cancelled((lease,))
        self.answer(lease, *_interrupted(group, self._leaving or "it sleeps"))

    def _depart(self, deadline: float) -> None:
        if not self.alive:
            return
        if any(held.phase == "answered" for held in self.leases.held()) and self.cluster.clock.now < deadline:
            self.cluster.clock.after(0.1, self._depart, deadline)
        else:
            super().leave(self._leaving)

    def _offer(self, message: wire.PublishWeights) -> None:
        if message.version != self.core.version:
            self.fail(message.lease, f"version {self.core.version} is in use, not version {message.version}")
            return
        self._offered = message.version
        published = wire.WeightsPublished(lease=message.lease, version=message.version, publish_s=0.0)
        self.answer(message.lease, published, (encoded_offer(message.version),))

    def _apply(self, actions: list[core.Action]) -> None:
        for action in actions:
            match action:
                case core.StartGroup(message=message):
                    self.engine[message.lease] = self._engine_group(*self._commands[message.lease])
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
                    self.fall_asleep()
                    self.answer(lease, wire.Slept(lease=lease))
                case core.WakeUp(lease=lease, repeated=repeated):
                    if not self.awake:
                        self.wake()
                    if not repeated:
                        self._apply(self.core.woken(self.core.version))
                    self.answer(lease, wire.Woken(lease=lease))

    # --- the engine ------------------------------------------------------------------------------------------------

    @property
    def _token_s(self) -> float:
        return self.cluster.scenario.workload.token_s * self.slowness

    def _engine_group(self, message: wire.GenerateGroup, buffers: Buffers) -> EngineGroup:
        """Return a group at its start, or with the partial completions of another rollout."""
        length = length_of(message.sampling.seed, self.cluster.scenario.workload.tokens)
        num = message.partial[0].num_tokens if message.partial else 0
        temperatures, versions = (struct.unpack(f"<{num}{kind}", buffers[at][: 4 * num]) if num else ()
                                  for kind, at in (("f", 1), ("i", 2)))  # fmt: skip
        require(num <= length, f"{message.prompt.id} is resumed from {num} tokens, and has {length}")
        return EngineGroup(message, length, list(versions), self.cluster.clock.now, [-one for one in temperatures])

    def _sample(self, lease: str) -> None:
        """Schedule the end of a group, which an interruption invalidates."""
        group = self.engine[lease]
        group.since, group.schedule_number = self.cluster.clock.now, group.schedule_number + 1
        seconds = (group.num_tokens - len(group.versions)) * self._token_s
        self.cluster.clock.after(seconds, self._finish_group, lease, group.schedule_number)

    def _finish_group(self, lease: str, schedule_number: int) -> None:
        group = self.engine.get(lease)
        if not self.alive or group is None or group.schedule_number != schedule_number:
            return
        if not self.core.may_generate:
            return
        self._record_tokens(group, group.num_tokens)
        del self.engine[lease], self._commands[lease]
        self.core.finished(lease)
        self.answer(lease, *_generated(group))

    def _interrupt(self) -> None:
        """Record the tokens so far, which come from the version that is replaced now."""
        for group in self.engine.values():
            group.schedule_number += 1
            if self.core.may_generate:
                num = int((self.cluster.clock.now - group.since) / self._token_s)
                self._record_tokens(group, min(group.num_tokens, len(group.versions) + num))

    def _record_tokens(self, group: EngineGroup, num_tokens: int) -> None:
        require(self.awake, f"{self.name} samples while it sleeps")
        version = self.core.version
        proven = self.content == content_of(version)
        require(proven, f"{self.name} samples with weights that are not version {version}")
        num = num_tokens - len(group.versions)
        self.cluster.busy_s["rollout"] += num * self._token_s
        self.busy_s += num * self._token_s
        group.versions += [version] * num
        group.temperatures += [group.message.sampling.temperature] * num

    # --- the weights -----------------------------------------------------------------------------------------------

    def _pull(self, message: wire.AdoptWeights, buffers: Buffers) -> None:
        source = message.source or "policy-0"
        self._current_pull = (f"version {message.version}", self.cluster.clock.now, source)
        self._relayed, self._pulled_content, self._pulling_since = None, b"", self.cluster.clock.now
        if message.announce:
            self._announce(message)
        holder = self.cluster.replicas.get(source)
        seconds = self.sample_duration(self.cluster.scenario.workload.pull_s)
        self.cluster.clock.after(
            seconds, self._pulled, message, buffers, source, -1 if holder is None else holder.incarnation
        )

    def _pulled(self, message: wire.AdoptWeights, buffers: Buffers, source: str, incarnation: int) -> None:
        if not self.alive:
            return
        self._current_pull = None
        offer = decode_offer(buffers[0])
        checked_plan(buffers[1], source, self.name)
        require(
            offer.version == message.version,
            f"{self.name} adopts version {message.version} from another offer",
        )
        content = self._read_relays(message)
        problem = None
        if content is None:
            problem = self.cluster.pull_problem(source, incarnation, message.version)
            content = b"" if problem is not None else self.cluster.sent_by(source, message.version)
        if problem is not None:
            self._relayed = None
        self._pulled_content, self._pulled_buffers = content, buffers
        self._apply(self.core.pulled(message.lease, problem))

    def _announce(self, message: wire.AdoptWeights) -> None:
        """Serve what this pull brings, and say so; now and then in vain."""
        rng, problem = self.cluster.rng, "nothing is staged"
        if rng.random() < NO_RELAY_SHARE:
            self.send(wire.RelayOffered(lease=message.lease, version=message.version, problem=problem))
            return
        self._relayed = message
        offered = wire.RelayOffered(lease=message.lease, version=message.version)
        self.send(offered, (encoded_relay_offer(message.version, num_ranks_of(self.name)),))

    def relayed(self, version: int, began: float) -> bytes | None:
        """Return the bytes of `version` as this replica passes them on: others, if it lies.

        Of what has not arrived yet it passes on what its own source sends. Returns None if it does not serve the
        snapshot any more that it had when its reader's pull `began`.
        """
        message = self._relayed
        if message is None or message.version != version or not self.alive or self._pulling_since > began:
            return None
        if self.forges_weights:
            self.cluster.num_false_pulls += 1
            return FLIPPED
        if self._pulled_content:
            return self._pulled_content
        content = self._read_relays(message)
        return content_of(version) if content is None else content

    def _read_relays(self, message: wire.AdoptWeights) -> bytes | None:
        """Return the bytes that a relay of this pull sends, or None if none of them serves the version any more."""
        for name in message.relays:
            relay = self.cluster.replicas.get(name)
            if (
                isinstance(relay, SimulatedRollout)
                and (content := relay.relayed(message.version, self._pulling_since)) is not None
            ):
                return content
        return None

    def _switch(self, lease: str) -> None:
        assert self.core.adopting is not None, "a switch follows a pull"
        self._interrupt()
        message = self.core.adopting
        is_whole = self.cluster.rng.random() >= self.cluster.faults.torn
        self.content = self._pulled_content if is_whole else b"torn"
        self._offered = -1
        answer = adopted(message, self._pulled_buffers, self._pulled_content)
        is_published = not message.layout_roots or answer.layout_root in message.layout_roots
        proven = is_whole and is_published
        actions = self.core.switched(lease, proven=proven, answered=is_whole)
        if is_whole:
            self.answer(lease, answer)
        if proven:
            self.cluster.guarantees.on_adopted(self.name, self.incarnation, message.version)
            for held in self.engine:
                self._sample(held)
        self._apply(actions)


def _tensors(group: EngineGroup) -> tuple[tuple[wire.TensorMeta, ...], Buffers]:
    """Return token ids, log-probabilities and versions of all completions, which are equal."""
    num = len(group.versions)
    versions = struct.pack(f"<{num}i", *group.versions) * group.message.num_completions
    # In place of the log-probabilities: minus the temperatures that they would depend on.
    logprobs = struct.pack(f"<{num}f", *(-one for one in group.temperatures)) * group.message.num_completions
    shape = (num * group.message.num_completions,)
    tensors = tuple(
        wire.TensorMeta(dtype=dtype, shape=shape, nbytes=len(versions)) for dtype in ("int32", "float32", "int32")
    )
    return tensors, (bytes(len(versions)), logprobs, versions)


def _interrupted(group: EngineGroup, reason: str) -> tuple[wire.GroupInterrupted, Buffers]:
    message, num = group.message, len(group.versions)
    tensors, buffers = _tensors(group)
    interrupted = wire.GroupInterrupted(
        lease=message.lease,
        reason=reason,
        partial=(wire.PartialCompletionMeta(num_tokens=num),) * message.num_completions if num else (),
        tensors=tensors if num else (),
        temperature=message.sampling.temperature,
    )
    return interrupted, buffers if num else ()


def _generated(group: EngineGroup) -> tuple[wire.GroupGenerated, Buffers]:
    message, versions = group.message, group.versions
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
    tensors, buffers = _tensors(group)
    prompt = struct.pack("<i", message.sampling.seed % 2**31)
    generated = wire.GroupGenerated(
        lease=message.lease,
        trajectories=trajectories,
        tensors=(wire.TensorMeta(dtype="int32", shape=(1,), nbytes=4), *tensors),
        temperature=message.sampling.temperature,
    )
    return generated, (prompt, *buffers)
