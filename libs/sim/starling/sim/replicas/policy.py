"""Simulated policy: the real state of its core, and weights that are a digest of everything they were trained on.

Two policies that trained the same steps from the same initial weights hold the same digest. Comparing digests finds a
step that was made twice with different groups, a step that was left out, and a replay with other groups.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Final

from starling.algo.staleness import staleness
from starling.common.ids import Role
from starling.common.wire import messages as wire
from starling.policy.core.admission import PolicyState
from starling.sim.checks.guarantees import buffers_by_group, check_tokens
from starling.sim.errors import require
from starling.sim.replicas.collective import StepItem, StepShare
from starling.sim.replicas.replica import Buffers, Cluster, SimulatedReplica
from starling.sim.replicas.weights import adopted, checked_plan, encoded_offer, offer_of, published

COLLECTIVE_S: Final = 30.0
"""A policy that has waited this long for the other policies of a step fails the step."""
INITIAL_WEIGHTS: Final = "the initial weights"

PolicyWork = wire.TrainStep | wire.PublishWeights | wire.SaveCheckpoint | wire.AdoptWeights | wire.Sleep | wire.Wake


class SimulatedPolicy(SimulatedReplica):
    """Executes one command at a time; the digests of a snapshot are computed in the background."""

    role: Role = "policy"

    def __init__(self, cluster: Cluster, name: str, incarnation: int) -> None:
        """Continue from the newest state that any policy saved."""
        super().__init__(cluster, name, incarnation)
        newest = max(cluster.saved, default=0)
        self.state = PolicyState(version=newest)
        self.digest = cluster.saved.get(newest, INITIAL_WEIGHTS)
        self.num_refused = 0
        self.num_overlaps = 0
        """Steps that began before the version that they start from was on offer."""
        self._offered = -1
        self._offer_digest = ""
        self._todo: list[tuple[PolicyWork, Buffers]] = []
        self._lease = ""
        """Of the command in progress."""
        self._waiting_since = -1.0
        """When it began to wait for the other policies of a step; -1 when it does not wait."""
        self._hangs = False

    @property
    def version(self) -> int:
        """The version of the weights."""
        return self.state.version

    @property
    def offered(self) -> int:
        """The version on offer; a new snapshot replaces the previous one."""
        return self._offered if self._offered == self.state.published else -1

    @property
    def root(self) -> str:
        """Root digest of the weights."""
        return offer_of(self.state.version).root

    def current_waits(self) -> list[wire.Wait]:
        """Return the wait for the other policies of a step, if there is one."""
        if self._waiting_since < 0:
            return []
        waited_s = self.cluster.clock.now - self._waiting_since
        what = f"the other policies in step {self.state.version + 1}"
        return [wire.Wait(what=what, on="policy", since_s=waited_s, seconds_left=max(0.0, COLLECTIVE_S - waited_s))]

    def execute(self, message: wire.LeasedCommand, buffers: Buffers) -> None:
        """Queue a command."""
        assert isinstance(message, PolicyWork), f"a policy was sent {message}"
        self._todo.append((message, buffers))
        self._begin_next()

    def cancel(self, leases: tuple[str, ...]) -> None:
        """Stop waiting for other policies. A computation in progress is finished; its answer is then ignored."""
        self._todo = [work for work in self._todo if work[0].lease not in leases]
        if self._waiting_since >= 0 and self._lease in leases:
            self._stop_waiting()

    def hang(self) -> None:
        """Compute nothing any more; heartbeats go on."""
        self._hangs = True
        self.cluster.collective.leave(self.name)

    def die(self) -> None:
        """End; policies that wait for it keep waiting."""
        super().die()
        self.cluster.collective.leave(self.name)

    @property
    def is_in_step(self) -> bool:
        """Return whether a command is in progress."""
        return bool(self._lease)

    def on_refused(self, reason: str) -> None:
        """Restart from the newest saved state, because the replica cannot catch up from the state that it has."""
        self.num_refused += 1
        require(self.num_refused < 2, f"{self.name} was refused again: {reason}")
        self.die()
        self.cluster.restart_later(self)

    # --- the command queue -----------------------------------------------------------------------------------------

    def _begin_next(self) -> None:
        ready = next((work for work in self._todo if not self._must_wait(work[0])), None)
        if ready is None or self._lease or self._hangs:
            return
        self._todo.remove(ready)
        message, buffers = ready
        self._lease = message.lease
        if not self.begin_work(message.lease):
            self._done()
            return
        if isinstance(message, wire.Sleep | wire.Wake):
            self._work(0.05, lambda: self._sleep_or_wake(message))
            return
        # It may have fallen asleep for want of the controller since the command was sent.
        objection = self._objection(message) if self.awake else "this policy is asleep: wake it first"
        if objection is not None:
            self.fail(message.lease, objection)
            self._done()
            return
        self._begin(message, buffers)

    def _sleep_or_wake(self, message: wire.Sleep | wire.Wake) -> None:
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
        self.cluster.clock.after(0.0, lambda: self._begin_next() if self.alive else None)

    def _work(self, seconds: float, action: Callable[[], None]) -> None:
        self._after(self.sample_duration(seconds), action)

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self.cluster.clock.after(seconds, lambda: action() if self.alive and not self._hangs else None)

    def _must_wait(self, message: PolicyWork) -> bool:
        orders = wire.TrainStep | wire.PublishWeights | wire.SaveCheckpoint
        return isinstance(message, orders) and self.state.must_wait(message)

    def _objection(self, message: PolicyWork) -> str | None:
        """Return why `message` cannot be executed, or None. The policy's core does not cover shared steps yet."""
        match message:
            case wire.AdoptWeights(version=version) if version <= self.state.version:
                return f"version {version} is not newer than version {self.state.version}, which this policy holds"
            case wire.AdoptWeights() | wire.Sleep() | wire.Wake():
                return None
            case wire.TrainStep(step=step) if step == self.state.version + 1 and message.num_replicas > 1:
                return None
            case wire.PublishWeights(version=version) if version == self._offered:
                return None
            case _:
                return self.state.objection(message)

    def _begin(self, message: PolicyWork, buffers: Buffers) -> None:
        work = self.cluster.scenario.workload
        match message:
            case wire.TrainStep():
                self._train(message, buffers)
            case wire.PublishWeights():
                self._publish(message, buffers)
            case wire.SaveCheckpoint():
                self._work(work.save_s, lambda: self._save(message))
            case wire.AdoptWeights():
                holder = self.cluster.replicas.get(message.source)
                incarnation = -1 if holder is None else holder.incarnation
                self._work(work.pull_s, lambda: self._adopt(message, buffers, incarnation))

    # --- steps -----------------------------------------------------------------------------------------------------

    def _train(self, message: wire.TrainStep, buffers: Buffers) -> None:
        snapshot = message.replayed or not message.groups or self.state.published >= message.published
        require(snapshot, f"version {message.step - 1} has no snapshot")
        self.num_overlaps += bool(message.groups) and not message.replayed and self._offered < message.published
        check_tokens(self.cluster.plan, message, buffers)
        items = _items_of(message, buffers)
        require(len(items) == len(message.groups) + len(message.examples), "a prompt occurs twice in a step")
        require(message.num_replicas == 1 or message.peers[message.replica] == self.name, "it is another policy's")
        seconds = self.sample_duration(self.cluster.scenario.workload.step_s / message.num_replicas)
        self.cluster.busy_s["policy"] += seconds
        after = self._step if message.num_replicas == 1 else self._reduce
        self._after(seconds, lambda: after(message, items))

    def _reduce(self, message: wire.TrainStep, items: dict[str, StepItem]) -> None:
        """Wait for the other policies of the step."""
        if message.lease not in {held.lease for held in self.leases.held()}:
            self._done()
            return
        self._waiting_since = since = self.cluster.clock.now

        def done() -> None:
            self._waiting_since = -1.0
            self._work(0.02, lambda: self._step(message, items))

        self.cluster.collective.arrive(StepShare(self.name, message, items, self.digest, done))
        self.cluster.clock.after(COLLECTIVE_S, self._time_out_wait, message.lease, since)

    def _time_out_wait(self, lease: str, since: float) -> None:
        if self.alive and self._lease == lease and self._waiting_since == since:
            self.fail(lease, f"the other policies did not come within {COLLECTIVE_S:g} s")
            self._stop_waiting()

    def _stop_waiting(self) -> None:
        self.cluster.collective.leave(self.name)
        self._waiting_since = -1.0
        self._done()

    def _step(self, message: wire.TrainStep, items: dict[str, StepItem]) -> None:
        """Make the step: the new digest covers the previous weights and everything that the step trained."""
        content = hashlib.blake2b(self.digest.encode(), digest_size=16)
        content.update(repr(sorted(message.settings.items())).encode())
        for prompt in sorted(items):
            content.update(prompt.encode())
            content.update(items[prompt].content)
        self.digest = content.hexdigest()
        self.state.version = message.step
        if self.cluster.guarantees.on_trained(message.step, list(items), self.digest) and message.groups:
            self.cluster.record_step(items)
        self.answer(message.lease, wire.StepTrained(lease=message.lease, step=message.step, metrics={}))
        self._done()

    # --- weights ---------------------------------------------------------------------------------------------------

    def _publish(self, message: wire.PublishWeights, plans: Buffers) -> None:
        version = message.version
        if version == self._offered:
            self._offer(message, plans)
            self._done()
            return
        self.state.published, self._offer_digest = version, self.digest
        self._work(self.cluster.scenario.workload.publish_s, lambda: self._offer(message, plans))
        self._work(self.cluster.scenario.workload.publish_s / 4, self._done)

    def _offer(self, message: wire.PublishWeights, plans: Buffers) -> None:
        if message.version == self.state.published:
            self._offered = message.version
        self.answer(message.lease, published(message, plans), (encoded_offer(message.version),))

    def _save(self, message: wire.SaveCheckpoint) -> None:
        if message.state:
            self.cluster.saved[message.step] = self.digest
        saved = wire.CheckpointSaved(lease=message.lease, step=message.step, path="/", state=message.state)
        self.answer(message.lease, saved)
        self._done()

    def _adopt(self, message: wire.AdoptWeights, buffers: Buffers, incarnation: int) -> None:
        """Copy weights and optimizer state from another policy."""
        problem = self.cluster.pull_problem(message.source, incarnation, message.version)
        holder = self.cluster.replicas.get(message.source)
        if problem is None and not (isinstance(holder, SimulatedPolicy) and message.peer == holder.name):
            problem = f"{message.source} has no optimizer state to copy"
        if problem is not None:
            self.fail(message.lease, problem)
        else:
            assert isinstance(holder, SimulatedPolicy)
            checked_plan(buffers[1], message.source, self.name)
            self.state.version, self.digest = message.version, holder.offer_digest
            self.cluster.guarantees.on_copied(message.version, self.digest)
            self.answer(message.lease, adopted(message, buffers))
        self._done()

    @property
    def offer_digest(self) -> str:
        """Digest of the weights in the newest snapshot."""
        return self._offer_digest


def _items_of(message: wire.TrainStep, buffers: Buffers) -> dict[str, StepItem]:
    """Return the groups or examples that a step trains, by prompt."""
    if message.examples:
        return {example.id: StepItem(example.text.encode()) for example in message.examples}
    items: dict[str, StepItem] = {}
    for group, of_group in buffers_by_group(message, buffers):
        temperature = group.temperature or message.temperature
        content = b"".join((*of_group, repr((temperature, group.trajectories)).encode()))
        stale = tuple(staleness(message.step, trajectory.oldest_version) for trajectory in group.trajectories)
        num_tokens = sum(trajectory.num_tokens for trajectory in group.trajectories)
        items[group.prompt_id] = StepItem(content, stale, num_tokens)
    return items
