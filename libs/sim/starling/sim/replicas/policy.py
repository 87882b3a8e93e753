"""A policy replica: the real bookkeeping of its core, and weights that are a digest of all that they were trained on.

Two policies that trained the same steps from the same start hold the same digest. A step made twice, differently, a
step left out, and a replay with other groups are found by comparing digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from starling.algo.staleness import staleness
from starling.common.ids import Role
from starling.common.wire import messages as wire
from starling.policy.core.admission import PolicyState
from starling.sim.checks.guarantees import buffers_by_group, check_tokens
from starling.sim.errors import demand
from starling.sim.replicas.collective import StepItem, StepShare
from starling.sim.replicas.replica import Buffers, SimulatedReplica
from starling.sim.replicas.rollout import adopted
from starling.sim.replicas.weights import checked_plan, encoded_offer, offer_of

if TYPE_CHECKING:
    from starling.sim.cluster.cluster import SimulatedCluster

COLLECTIVE_S: Final = 30.0
"""Who has waited so long for the shares of others gives up."""
START: Final = "the initial weights"

PolicyWork = wire.TrainStep | wire.PublishWeights | wire.SaveCheckpoint | wire.AdoptWeights | wire.Sleep | wire.Wake


class SimulatedPolicy(SimulatedReplica):
    """Does one piece of work at a time; digests of a snapshot follow beside it."""

    role: Role = "policy"

    def __init__(self, world: SimulatedCluster, name: str, epoch: int) -> None:
        """Continue from the newest state that any policy saved."""
        super().__init__(world, name, epoch)
        newest = max(world.saved, default=0)
        self.progress = PolicyState(version=newest)
        self.digest = world.saved.get(newest, START)
        self.num_refused = 0
        self.num_overlaps = 0
        """Steps that began before the version that they start from was offered."""
        self._offered = -1
        self._offer_digest = ""
        self._todo: list[tuple[PolicyWork, Buffers]] = []
        self._lease = ""
        """Of the work that it is busy with."""
        self._waiting_since = -1.0
        """Since when it has waited for the shares of others."""

    @property
    def version(self) -> int:
        """The version that it holds."""
        return self.progress.version

    @property
    def offered(self) -> int:
        """The version on offer; a new snapshot takes the place of the old one."""
        return self._offered if self._offered == self.progress.published else -1

    @property
    def root(self) -> str:
        """Root of the weights that it holds."""
        return offer_of(self.progress.version).root

    def waits(self) -> list[wire.Wait]:
        """Return its wait for the other shares of a step."""
        if self._waiting_since < 0:
            return []
        waited_s = self.world.clock.now - self._waiting_since
        what = f"the other shares of step {self.progress.version + 1}"
        return [wire.Wait(what=what, on="policy", since_s=waited_s, seconds_left=max(0.0, COLLECTIVE_S - waited_s))]

    def do(self, message: wire.LeasedCommand, buffers: Buffers) -> None:
        """Queue a piece of work."""
        assert isinstance(message, PolicyWork), f"a policy was sent {message}"
        self._todo.append((message, buffers))
        self._take()

    def give_up(self, leases: tuple[str, ...]) -> None:
        """Stop to wait for the others' shares. What is being computed goes on to its end, and is answered to nobody."""
        self._todo = [work for work in self._todo if work[0].lease not in leases]
        if self._waiting_since >= 0 and self._lease in leases:
            self._stop_waiting()

    def die(self) -> None:
        """Be gone; who waits for its share waits on."""
        super().die()
        self.world.collective.leave(self.name)

    @property
    def is_in_step(self) -> bool:
        """Say whether it computes."""
        return bool(self._lease)

    def refused(self, reason: str) -> None:
        """It cannot catch up from where it is: it begins again, from the newest state that was saved."""
        self.num_refused += 1
        demand(self.num_refused < 2, f"{self.name} was refused again: {reason}")
        self.die()
        self.world.start_again(self)

    # --- one thing at a time ---------------------------------------------------------------------------------------

    def _take(self) -> None:
        ready = next((work for work in self._todo if not self._must_wait(work[0])), None)
        if ready is None or self._lease:
            return
        self._todo.remove(ready)
        message, buffers = ready
        self._lease = message.lease
        if not self.works(message.lease):
            self._done()
            return
        if isinstance(message, wire.Sleep | wire.Wake):
            self._later(0.05, lambda: self._turn(message))
            return
        # It may have fallen asleep by itself since it was asked.
        objection = self._objection(message) if self.awake else "this policy sleeps: wake it first"
        if objection is not None:
            self.fail(message.lease, objection)
            self._done()
            return
        self._begin(message, buffers)

    def _turn(self, message: wire.Sleep | wire.Wake) -> None:
        """Give the devices away, or take them."""
        if isinstance(message, wire.Sleep):
            self.awake = False
            self.answer(message.lease, wire.Slept(lease=message.lease))
        else:
            if not self.awake:
                self.wake()
            self.answer(message.lease, wire.Woken(lease=message.lease))
        self._done()

    def _done(self) -> None:
        self._lease = ""
        self.world.clock.after(0.0, lambda: self._take() if self.alive else None)

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self._in(self.takes(seconds), action)

    def _in(self, seconds: float, action: Callable[[], None]) -> None:
        self.world.clock.after(seconds, lambda: action() if self.alive else None)

    def _must_wait(self, message: PolicyWork) -> bool:
        orders = wire.TrainStep | wire.PublishWeights | wire.SaveCheckpoint
        return isinstance(message, orders) and self.progress.must_wait(message)

    def _objection(self, message: PolicyWork) -> str | None:
        """Say why `message` cannot be done. What policies do together, no policy's core decides yet."""
        match message:
            case wire.AdoptWeights(version=version) if version <= self.progress.version:
                return f"version {version} is not newer than version {self.progress.version}, which this policy holds"
            case wire.AdoptWeights() | wire.Sleep() | wire.Wake():
                return None
            case wire.TrainStep(step=step) if step == self.progress.version + 1 and message.num_replicas > 1:
                return None  # and its share may be empty
            case wire.PublishWeights(version=version) if version == self._offered:
                return None
            case _:
                return self.progress.objection(message)

    def _begin(self, message: PolicyWork, buffers: Buffers) -> None:
        work = self.world.scenario.work
        match message:
            case wire.TrainStep():
                self._train(message, buffers)
            case wire.PublishWeights():
                self._publish(message)
            case wire.SaveCheckpoint():
                self._later(work.save_s, lambda: self._save(message))
            case wire.AdoptWeights():
                holder = self.world.replicas.get(message.source)
                epoch = -1 if holder is None else holder.epoch
                self._later(work.pull_s, lambda: self._adopt(message, buffers, epoch))

    # --- steps -----------------------------------------------------------------------------------------------------

    def _train(self, message: wire.TrainStep, buffers: Buffers) -> None:
        snapshot = message.replayed or not message.groups or self.progress.published >= message.published
        demand(snapshot, f"version {message.step - 1} has no snapshot")
        self.num_overlaps += bool(message.groups) and not message.replayed and self._offered < message.published
        check_tokens(self.world.plan, message, buffers)
        pieces = _pieces(message, buffers)
        demand(len(pieces) == len(message.groups) + len(message.examples), "a prompt is twice in a step")
        seconds = self.takes(self.world.scenario.work.step_s / message.num_replicas)
        self.world.busy_s["policy"] += seconds
        after = self._step if message.num_replicas == 1 else self._reduce
        self._in(seconds, lambda: after(message, pieces))

    def _reduce(self, message: wire.TrainStep, pieces: dict[str, StepItem]) -> None:
        """Wait for the other shares."""
        if message.lease not in {held.lease for held in self.book.held()}:
            self._done()
            return
        self._waiting_since = since = self.world.clock.now

        def done(whole: dict[str, StepItem]) -> None:
            self._waiting_since = -1.0
            self._later(0.02, lambda: self._step(message, whole))

        self.world.collective.arrive(StepShare(self.name, message, pieces, self.digest, done))
        self.world.clock.after(COLLECTIVE_S, self._lose_patience, message.lease, since)

    def _lose_patience(self, lease: str, since: float) -> None:
        if self.alive and self._lease == lease and self._waiting_since == since:
            self.fail(lease, f"the other shares did not come within {COLLECTIVE_S:g} s")
            self._stop_waiting()

    def _stop_waiting(self) -> None:
        self.world.collective.leave(self.name)
        self._waiting_since = -1.0
        self._done()

    def _step(self, message: wire.TrainStep, whole: dict[str, StepItem]) -> None:
        """Make the step: the weights are now what they were, and all that the step trained."""
        content = hashlib.blake2b(self.digest.encode(), digest_size=16)
        content.update(repr(sorted(message.settings.items())).encode())
        for prompt in sorted(whole):
            content.update(prompt.encode())
            content.update(whole[prompt].content)
        self.digest = content.hexdigest()
        self.progress.version = message.step
        if self.world.promises.trained(message.step, list(whole), self.digest) and message.groups:
            self.world.note_step(whole)
        self.answer(message.lease, wire.StepTrained(lease=message.lease, step=message.step, metrics={}))
        self._done()

    # --- weights ---------------------------------------------------------------------------------------------------

    def _publish(self, message: wire.PublishWeights) -> None:
        lease, version = message.lease, message.version
        if version == self._offered:
            self._offer(lease, version)
            self._done()
            return
        self.progress.published, self._offer_digest = version, self.digest
        self._later(self.world.scenario.work.publish_s, lambda: self._offer(lease, version))
        self._later(self.world.scenario.work.publish_s / 4, self._done)

    def _offer(self, lease: str, version: int) -> None:
        if version == self.progress.published:
            self._offered = version
        published = wire.WeightsPublished(lease=lease, version=version, publish_s=0.0)
        self.answer(lease, published, (encoded_offer(version),))

    def _save(self, message: wire.SaveCheckpoint) -> None:
        if message.state:
            self.world.saved[message.step] = self.digest
        saved = wire.CheckpointSaved(lease=message.lease, step=message.step, path="/", state=message.state)
        self.answer(message.lease, saved)
        self._done()

    def _adopt(self, message: wire.AdoptWeights, buffers: Buffers, epoch: int) -> None:
        """Take weights and optimizer state over from another policy."""
        problem = self.world.pull_problem(message.source, epoch, message.version)
        holder = self.world.replicas.get(message.source)
        if problem is None and not (message.with_state and isinstance(holder, SimulatedPolicy)):
            problem = f"{message.source} has no state of an optimizer to give"
        if problem is not None:
            self.fail(message.lease, problem)
        else:
            assert isinstance(holder, SimulatedPolicy)
            checked_plan(buffers[1], message.source, self.name)
            self.progress.version, self.digest = message.version, holder.offer_digest
            self.world.promises.taken_over(message.version, self.digest)
            self.answer(message.lease, adopted(message.lease, message.version))
        self._done()

    @property
    def offer_digest(self) -> str:
        """Digest of the weights in its newest snapshot."""
        return self._offer_digest


def _pieces(message: wire.TrainStep, buffers: Buffers) -> dict[str, StepItem]:
    """Return what a step trains, by prompt."""
    if message.examples:
        return {example.id: StepItem(example.text.encode()) for example in message.examples}
    pieces = {}
    for group, of_group in buffers_by_group(message, buffers):
        temperature = group.temperature or message.temperature
        content = b"".join((*of_group, repr((temperature, group.trajectories)).encode()))
        stale = tuple(staleness(message.step, trajectory.oldest_version) for trajectory in group.trajectories)
        num_tokens = sum(trajectory.num_tokens for trajectory in group.trajectories)
        pieces[group.prompt_id] = StepItem(content, stale, num_tokens)
    return pieces
