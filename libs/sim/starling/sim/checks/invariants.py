"""What must hold inside of the controller after every event. Nothing else looks into its state."""

from __future__ import annotations

from collections import Counter
from typing import Final

from starling.common.ids import LEASE_KINDS, lease_kind, lease_subject
from starling.common.wire import messages as wire
from starling.controller.core.events import Command, Event, FinishRun, Note, Received, Write
from starling.controller.core.explain import explain
from starling.controller.core.groups.group import Groups, GroupState
from starling.controller.core.plan import RunPlan
from starling.controller.core.records import PartialCompletionsStored
from starling.controller.core.state import ControllerState
from starling.sim.checks.guarantees import Guarantees
from starling.sim.errors import demand

SMALL: Final = 64
"""Of so many members and groups, or fewer, every one is looked at after every event; of more, all now and then."""
LOOK_EVERY_S: Final = 2.0


class Invariants:
    """Compares the controller's books with each other, and with what has been seen of the run so far."""

    def __init__(self, plan: RunPlan, promises: Guarantees, longest_s: float) -> None:
        """No lease may be in force for longer than `longest_s`."""
        self.plan, self._promises, self._longest_s = plan, promises, longest_s
        self.discarded: set[str] = set()
        self._look_at = 0.0

    def begin(self, state: ControllerState) -> None:
        """Another controller begins, and knows what the one before wrote down."""
        self.state = state
        self._version, self._published = state.version, state.rounds.version
        self._max_live = (self.plan.max_staleness + 1) * self.plan.prompts_per_step
        self._to_go = 0
        self._given_back, self._num_given = "", 0
        """The group whose tokens the event in hand gave back, and how many."""
        self._seen: dict[str, float] = {}

    @property
    def waiting_for(self) -> str:
        """What the controller says that it waits for."""
        return explain(self.state)

    @property
    def version(self) -> int:
        """The newest version."""
        return self.state.version

    def before_event(self, event: Event) -> None:
        """Note what the event must lead to."""
        self._given_back = ""
        if isinstance(event, Received) and isinstance(event.message, wire.GroupInterrupted):
            lease, tokens = self.state.leases.get(event.message.lease), event.message.partial
            member = self.state.membership.get(event.sender, event.epoch)
            if lease is not None and member is not None and lease.peer == member.name and tokens:
                self._given_back = lease_subject(lease.id)
                self._num_given = sum(one.num_tokens for one in tokens)

    def _demand_more(self, key: str) -> None:
        """Demand that there is more of a group than was given back of it."""
        found = self.state.find(key)
        partial = None if found is None else found[1].partial
        demand(partial is not None and partial.num_tokens > self._num_given, f"the tokens of {key} were thrown away")

    def after_event(self, now: float, commands: list[Command]) -> None:
        """Look at the controller's state."""
        state = self.state
        kept = {
            c.record.key for c in commands if isinstance(c, Write) and isinstance(c.record, PartialCompletionsStored)
        }
        if self._given_back and self._given_back not in kept:
            self._demand_more(self._given_back)
        demand(state.version >= self._version, f"version {state.version} follows version {self._version}")
        demand(state.rounds.version >= self._published, "an older version was published")
        self._version, self._published = state.version, state.rounds.version
        self._ledger()
        for command in commands:
            if isinstance(command, Note) and command.kind == "discarded" and command.fields["prompt"][:5] == "train":
                self.discarded.add(command.fields["prompt"])
        self._to_go -= 1
        if self._to_go <= 0:
            size = len(state.membership.members) + state.ledger.num_live
            self._to_go = 1 if size <= SMALL else size
            self._books()
            self._members()
        if now >= self._look_at:
            self._look_at = now + LOOK_EVERY_S
            self._waits(now)

    def at_end(self, finish: FinishRun, *, whole: bool) -> None:
        """The run is over: did it end well, and was it evaluated as it should be?"""
        demand(finish.ok, f"the run failed: {finish.reason}")
        state, plan = self.state, self.plan
        if whole:
            due = {cause for cause in ("start", "end") if getattr(plan, f"evaluate_at_{cause}")}
            done = set(state.evaluated) - {"step", "request"}
            demand(done == due, f"evaluated were {state.evaluated}, and due at {due}")

    def _ledger(self) -> None:
        ledger = self.state.ledger
        demand(ledger.num_live <= self._max_live, f"{ledger.num_live} groups live, {self._max_live} may")
        # What a run without a policy gives up has its place in a file, and is trained there like the others.
        num_gone = ledger.num_discarded + ledger.num_filtered if self.plan.has_policy else 0
        accounted = ledger.num_live + ledger.num_trained_groups + num_gone
        demand(ledger.num_admitted == accounted, f"{ledger.num_admitted} groups were admitted, {accounted} are known")

    def _books(self) -> None:
        """Every live group is in one state, and who works on it holds a lease for it."""
        state, leases = self.state, Counter[str]()
        for member in state.membership.members.values():
            leases.update(
                lease.rpartition(":")[0] for lease in state.leases.of(member.name, "generate", "score", "teach")
            )
        demand(all(num == 1 for num in leases.values()), f"work was dealt twice: {leases}")
        wanted = set[str]()
        books: list[Groups] = [state.ledger] + ([state.evaluation] if state.evaluation is not None else [])
        for book in books:
            wanted |= _wanted(book)
        demand(wanted == set(leases), f"the groups need {wanted ^ set(leases)} otherwise")
        if state.evaluation is not None:
            for group in state.evaluation.within(GroupState.GENERATED):
                version = state.evaluation.version
                versions = {v for t in group.trajectories for v in (t.oldest_version, t.newest_version)}
                demand(versions == {version}, f"the evaluation of version {version} holds tokens of {versions}")

    def _members(self) -> None:
        """Nobody has more work than slots, and who is said to hold a version has proven it."""
        state = self.state
        for member in state.membership.members.values():
            if member.role == "policy":
                continue
            kind = {"rollout": "generate", "reward": "score", "teacher": "teach"}[member.role]
            num = len(state.leases.of(member.name, kind))
            demand(num <= member.num_slots, f"{member.name} has {num} leases and {member.num_slots} slots")
            demand(len(state.leases.of(member.name, "adopt")) <= 1, f"{member.name} adopts twice at a time")
            proven = member.version < 0 or self._promises.has_adopted(member.name, member.epoch, member.version)
            demand(proven, f"{member.name} is said to hold version {member.version}, which it never proved")
        rollouts = state.membership.of("rollout")
        held = {(member.version, member.host, member.name) for member in rollouts if member.version >= 0}
        known = {(*place, name) for place, names in state.holders.items() for name in names}
        demand(known == held, f"who holds what is known otherwise: {known ^ held}")
        names = {*state.behind, *state.rounds.offers, *state.failing_since}
        demand(names <= state.membership.members.keys(), f"{names - state.membership.members.keys()} are gone")

    def _waits(self, now: float) -> None:
        """Every lease ends: by its answer, or with its holder's membership."""
        held = [lease for name in self.state.membership.members for lease in self.state.leases.of(name, *LEASE_KINDS)]
        self._seen = {lease: self._seen.get(lease, now) for lease in held}
        for lease, since in self._seen.items():
            waited = now - since
            demand(waited <= self._longest_s, f"{lease_kind(lease)} {lease} is in force for {waited:.0f} s")


def _wanted(book: Groups) -> set[str]:
    """Return the leases that the groups of a book must have, and look at the book itself."""
    wanted, seen = set[str](), Counter[GroupState]()
    for group in book.live():
        seen[group.state] += 1
        if group.state is GroupState.LEASED:
            wanted.add(f"generate:{group.key}")
        for kind, lease in (("score", group.scoring), ("teach", group.teaching)):
            if lease:
                demand(group.state is GroupState.GENERATED, f"{group.key} has {lease} while it is {group.state}")
                wanted.add(f"{kind}:{group.key}")
    for group_state in GroupState:
        num = book.count(group_state)
        demand(num == seen[group_state], f"{num} groups are counted as {group_state}, {seen[group_state]} are")
    return wanted
