"""Invariants of the controller's internal state, checked after every event.

`guarantees.py` checks what can be seen from outside instead. This is the only module of the simulation that reads the
state.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from starling.common.ids import LEASE_KINDS, lease_kind, lease_subject
from starling.common.wire import messages as wire
from starling.controller.core.events import Command, Event, FinishRun, Note, Received, Write
from starling.controller.core.explain import explain
from starling.controller.core.groups.group import Groups, GroupState
from starling.controller.core.plan import RunPlan
from starling.controller.core.records import PartialCompletionsStored, StepFrozen
from starling.controller.core.state import ControllerState
from starling.sim.checks.guarantees import Guarantees, right
from starling.sim.errors import require

SMALL: Final = 64
"""Up to this many members and live groups, all are checked after every event; of more, all at intervals."""
CHECK_LEASES_EVERY_S: Final = 2.0


class Invariants:
    """Compares the parts of the controller's state with each other, and with the run so far."""

    def __init__(self, plan: RunPlan, guarantees: Guarantees, longest_s: float, *, has_liars: bool = False) -> None:
        """Begin a run in which no lease may be in force for longer than `longest_s`.

        `has_liars`: replicas give other rewards than they should.
        """
        self._has_liars = has_liars
        self.plan, self._guarantees, self._longest_s = plan, guarantees, longest_s
        self.discarded: set[str] = set()
        self._check_leases_at = 0.0

    def begin(self, state: ControllerState) -> None:
        """Check the state of a new incarnation of the controller from now on."""
        self.state = state
        self._version, self._published = state.version, state.weights.version
        self._published_at: float | None = None
        """When the last version was published; None if it is not known, or if the next one may be needed sooner."""
        self._max_live = (self.plan.max_staleness + 1) * self.plan.prompts_per_step
        self._events_to_skip = 0
        self._interrupted, self._num_tokens = "", 0
        """Key of the group that the current event interrupts, and the number of its tokens."""
        self._held_since: dict[str, float] = {}

    @property
    def waiting_for(self) -> str:
        """The controller's explanation of what the run waits for."""
        return explain(self.state)

    @property
    def version(self) -> int:
        """The newest weight version."""
        return self.state.version

    def before_event(self, event: Event) -> None:
        """Remember the tokens of an interrupted group, which the controller must keep unless it was begun anew."""
        self._interrupted = ""
        if isinstance(event, Received) and isinstance(event.message, wire.GroupInterrupted):
            lease, tokens = self.state.replicas.leases.get(event.message.lease), event.message.partial
            member = self.state.replicas.membership.get(event.sender, event.incarnation)
            found = self.state.group_of_lease(event.message.lease)
            is_kept = found is not None and not found[1].is_anew
            if lease is not None and member is not None and lease.peer == member.name and tokens and is_kept:
                self._interrupted = lease_subject(lease.id)
                self._num_tokens = sum(one.num_tokens for one in tokens)

    def _require_more_tokens(self, key: str) -> None:
        """Require that the controller holds more tokens of a group than the current event brought."""
        found = self.state.find_group(key)
        partial = None if found is None else found[1].partial
        require(partial is not None and partial.num_tokens > self._num_tokens, f"the tokens of {key} were dropped")

    def after_event(self, now: float, commands: list[Command]) -> None:
        """Check the state after an event."""
        state = self.state
        stored = {
            c.record.key for c in commands if isinstance(c, Write) and isinstance(c.record, PartialCompletionsStored)
        }
        if self._interrupted and self._interrupted not in stored:
            self._require_more_tokens(self._interrupted)
        require(state.version >= self._version, f"version {state.version} follows version {self._version}")
        require(state.weights.version >= self._published, "an older version was published")
        self._check_publication(now)
        self._version, self._published = state.version, state.weights.version
        self._check_buffer()
        for command in commands:
            if isinstance(command, Write) and isinstance(command.record, StepFrozen) and not self._has_liars:
                self._check_rewards(command.record.step)
        for command in commands:
            if isinstance(command, Note) and command.kind == "discarded" and command.fields["prompt"][:5] == "train":
                self.discarded.add(command.fields["prompt"])
        self._events_to_skip -= 1
        if self._events_to_skip <= 0:
            size = len(state.replicas.membership.members) + state.buffer.num_live
            self._events_to_skip = 1 if size <= SMALL else size
            self._check_groups()
            self._check_members()
        if now >= self._check_leases_at:
            self._check_leases_at = now + CHECK_LEASES_EVERY_S
            self._check_leases(now)

    def at_end(self, finish: FinishRun, *, whole: bool) -> None:
        """Check that the run succeeded and was evaluated as planned; `whole`: it was not stopped early."""
        require(finish.ok, f"the run failed: {finish.reason}")
        state, plan = self.state, self.plan
        if whole:
            due = {cause for cause in ("start", "end") if getattr(plan, f"evaluate_at_{cause}")}
            done = set(state.evaluations.evaluated) - {"step", "request"}
            require(done == due, f"the run was evaluated at {done}, and should have been at {due}")

    def _check_rewards(self, step: int) -> None:
        """Check that each reward of a frozen step belongs to the text stored with it."""
        for group in self.state.buffer.frozen_groups(step) if self.plan.num_rewards else ():
            for trajectory, reward in zip(group.trajectories, group.rewards, strict=True):
                of_text = reward == right(trajectory.text)
                require(of_text, f"step {step} has the reward {reward} for the text {trajectory.text!r} of {group.key}")

    def _check_publication(self, now: float) -> None:
        """No version is published sooner than the plan says, unless training or replicas without weights need it."""
        state, plan = self.state, self.plan
        version, first = state.weights.version, max(plan.num_supervised_steps, plan.begin_version)
        if version > self._published:
            num_steps, max_staleness = version - self._published, state.buffer.max_staleness
            if self._published_at is not None and version < plan.last_step and num_steps < max_staleness:
                rested_s = now - self._published_at
                text = f"version {version} was published {num_steps} steps and {rested_s:g} s after the one before"
                require(num_steps >= plan.sync_every and rested_s >= plan.sync_every_s, text)
            self._published_at = now
        is_outdated = bool(state.replicas.outdated_policies(state.version))
        if version < first or is_outdated or not state.weights.is_offered_by_policy(version):
            self._published_at = None

    def _check_buffer(self) -> None:
        buffer = self.state.buffer
        require(buffer.num_live <= self._max_live, f"{buffer.num_live} groups are live, of {self._max_live} at most")
        # Discarded groups of a run without a policy are written to its files like all others.
        num_gone = buffer.num_discarded + buffer.num_filtered if self.plan.kind.trains else 0
        accounted = buffer.num_live + buffer.num_trained_groups + num_gone
        require(
            buffer.num_admitted == accounted,
            f"{buffer.num_admitted} groups were admitted, {accounted} are found",
        )

    def _check_groups(self) -> None:
        """Every live group is in one state, and each replica that works on it holds a lease for it."""
        state, leases = self.state, Counter[str]()
        for member in state.replicas.membership.members.values():
            held = state.replicas.leases.of(member.name, "generate", "score", "teach")
            leases.update(lease.rpartition(":")[0] for lease in held)
        require(all(num == 1 for num in leases.values()), f"work was dispatched twice: {leases}")
        evaluation, expected = state.evaluations.current, set[str]()
        all_groups: list[Groups] = [state.buffer] + ([evaluation] if evaluation is not None else [])
        for groups in all_groups:
            expected |= _leases_of(groups)
        require(expected == set(leases), f"leases and group states disagree: {expected ^ set(leases)}")
        if evaluation is not None:
            for group in evaluation.within(GroupState.GENERATED):
                version = evaluation.version
                versions = {v for t in group.trajectories for v in (t.oldest_version, t.newest_version)}
                require(versions == {version}, f"the evaluation of version {version} holds tokens of {versions}")

    def _check_members(self) -> None:
        """No member has more leases than slots, and each has proven to hold the version that is recorded for it."""
        state = self.state
        for member in state.replicas.membership.members.values():
            if member.role == "policy":
                continue
            kind = {"rollout": "generate", "reward": "score", "teacher": "teach"}[member.role]
            num = len(state.replicas.leases.of(member.name, kind))
            require(num <= member.num_slots, f"{member.name} has {num} leases and {member.num_slots} slots")
            num_adopting = len(state.replicas.leases.of(member.name, "adopt"))
            require(num_adopting <= 1, f"{member.name} adopts two versions at a time")
            proven = member.version < 0 or self._guarantees.has_adopted(member.name, member.incarnation, member.version)
            require(proven, f"{member.name} is recorded with version {member.version}, which it never proved")
        rollouts = state.replicas.membership.adopters()
        held = {(member.version, member.host, member.name) for member in rollouts if member.version >= 0}
        known = {(*place, name) for place, names in state.weights.holders.items() for name in names}
        require(known == held, f"the index of held versions disagrees with the members: {known ^ held}")
        names = {*state.weights.outdated, *state.weights.offers, *state.weights.failing_since}
        members = state.replicas.membership.members
        require(names <= members.keys(), f"{names - members.keys()} are gone")

    def _check_leases(self, now: float) -> None:
        """Every lease ends: with its answer, or with the membership of its holder."""
        replicas = self.state.replicas
        held = [lease for name in replicas.membership.members for lease in replicas.leases.of(name, *LEASE_KINDS)]
        self._held_since = {lease: self._held_since.get(lease, now) for lease in held}
        for lease, since in self._held_since.items():
            waited = now - since
            require(waited <= self._longest_s, f"{lease_kind(lease)} {lease} is in force for {waited:.0f} s")


def _leases_of(book: Groups) -> set[str]:
    """Check the states and counts of groups; return the leases that these must have."""
    expected, seen = set[str](), Counter[GroupState]()
    for group in book.live():
        seen[group.state] += 1
        if group.state is GroupState.LEASED:
            expected.add(f"generate:{group.key}")
        for kind, lease in (("score", group.score_lease), ("teach", group.teacher_lease)):
            if lease:
                require(group.state is GroupState.GENERATED, f"{group.key} has {lease} while it is {group.state}")
                expected.add(f"{kind}:{group.key}")
    for group_state in GroupState:
        num = book.count(group_state)
        require(num == seen[group_state], f"{num} groups are counted as {group_state}, and {seen[group_state]} are")
    return expected
