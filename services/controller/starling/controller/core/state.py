"""All that one run's controller knows, and the few ways to act on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from starling.common.ids import LEASE_KINDS, LeaseKind, Purpose, lease_id, lease_kind
from starling.common.wire import messages as wire
from starling.controller.core.dirty import Dirty
from starling.controller.core.evaluation.evaluation import Evaluation
from starling.controller.core.events import Buffers, Command, Fetch, Note, Prompts, Prune, Send, Write
from starling.controller.core.groups.buffer import ledger_of
from starling.controller.core.groups.group import Group, Groups
from starling.controller.core.lifecycle.stages import Lifecycle, RunStage
from starling.controller.core.plan import RunPlan
from starling.controller.core.records import JournalEntry, MemberLeft, Record
from starling.controller.core.replicas.estimates import LengthEstimates
from starling.controller.core.replicas.leases import Leases
from starling.controller.core.replicas.membership import Member, Membership
from starling.controller.core.replicas.slots import SlotIndex
from starling.controller.core.replicas.time_sharing import TimeSharing
from starling.controller.core.training.dynamic_settings import DYNAMIC, SettingChanges
from starling.controller.core.training.metrics import LatestMetrics
from starling.controller.core.training.step import ActiveStep
from starling.controller.core.weights.publications import Publications

TAKES_SLOT: Final = frozenset({"generate", "score", "teach"})
"""The kinds of work of which a replica has as much in hand as it has slots."""


class ControllerState:
    """The small machines, which know nothing of each other, and what couples them."""

    def __init__(
        self,
        plan: RunPlan,
        prompts: Prompts,
        examples: Prompts,
        held_out: Sequence[wire.Prompt],
        incarnation: int = 1,
    ) -> None:
        """`prompts` feed reinforcement learning, `examples` the supervised steps, `held_out` the evaluations."""
        self.plan, self.prompts, self.examples, self.held_out = plan, prompts, examples, list(held_out)
        self.incarnation = incarnation
        self.now = 0.0
        given = -1 if plan.has_policy else 0
        self.membership = Membership(plan.lease_s, given)
        self.leases = Leases()
        self.turns = TimeSharing(plan.colocate, plan.lease_s)
        self.rounds = Publications(version=given)
        self.ending = Lifecycle(plan.drain_s, plan.stop_s)
        self.changes = SettingChanges()
        self.ledger = ledger_of(plan)
        self.ledger.begin(max(0, plan.begin_version - plan.num_supervised_steps), plan.begin_prompt)
        self.version = plan.begin_version
        """The newest version that exists: how many steps were made; without a policy, how many files were written."""
        self.step: ActiveStep | None = None
        """The step in hand, which makes the next version."""
        self.num_broken = 0
        """How often policies failed to make a step together since the last one that was made."""
        self.fetching = -1
        """The step whose records are on their way from the journal; -1 for none."""
        self.fetched: tuple[int, tuple[JournalEntry, ...]] | None = None
        self.alarms: dict[str, wire.Alarm] = {}
        """Those that are on as of the last step that was made, by name."""
        self.saved_step = plan.begin_version
        """The newest version that a policy could continue from."""
        self.kept_from = plan.begin_version
        """The journal keeps what the steps after this version were made of: it is the saved state before the newest, so
        that a policy which finds that one damaged can begin from the other."""
        self.saved_at = float("-inf")
        """When a state was saved last, by this incarnation of the controller."""
        self.save_after = 0.0
        """Not before then is a state to be saved again, after a failure."""
        self.capacity = SlotIndex(self.leases)
        self.lengths = LengthEstimates()
        self.holders: dict[tuple[int, str], dict[str, None]] = {}
        """Rollouts by the version that they hold and their host."""
        self.behind: dict[str, None] = {}
        """Rollouts that need another version and do not pull it yet."""
        self.loose: dict[str, None] = {}
        """Rollouts that an evaluation may perhaps be bound to, since their version changed."""
        self.evaluation: Evaluation | None = None
        self.evaluated: dict[str, int] = {}
        """The newest version that was evaluated for each cause."""
        self.requested: list[wire.RequestEvaluation] = []
        self.granted: set[str] = set()
        """Requests whose evaluation has begun: each counts once, however often it arrives."""
        self.num_evaluations = 0
        self.num_eval_groups = 0
        self.awaited: set[str] = set()
        """Members of an earlier incarnation's run that were not heard yet, and may hold work."""
        self.await_until = float("-inf")
        self.missing_since: float | None = None
        """Since when a role that the run needs has had no replica."""
        self.idle_since = 0.0
        self.failing_since: dict[str, float] = {}
        """Since when a replica has failed to take over or to offer weights, again and again."""
        self.known = LatestMetrics()
        self.has_generated = False
        """Some group has been given to a rollout: the run does with fewer replicas than it began with."""
        self.drops_in_a_row = 0
        self.last_drop = ""
        """Which group was discarded last, and why."""
        self.due: int = Dirty.ALL
        self.written: list[Write] = []
        """What goes into the journal, and below what is done thereafter, of the present event."""
        self.out: list[Command] = []
        self._num_leases = 0
        self._patience_s = {kind: plan.patience_s(kind) for kind in LEASE_KINDS}
        self._train_sampling = plan.sampling

    def has_state(self, step: int) -> None:
        """Note that a policy can continue from version `step`."""
        if step > self.saved_step:
            self.kept_from, self.saved_step = self.saved_step, step

    # --- what the run is like --------------------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """What the run is doing: sft, dpo, reward_model, or what it does with groups; or how it ends."""
        if self.ending.stage is not RunStage.RUNNING:
            return str(self.ending.stage)
        return self.plan.phase(min(self.version + 1, self.plan.last_step))

    @property
    def has_begun(self) -> bool:
        """Say whether a step was dealt ever: from then on one replica of each role is enough."""
        return self.version > self.plan.begin_version or self.step is not None or self.ledger.has_sealed

    def current_policies(self) -> list[Member]:
        """Return the policies that hold the newest version, and so can make the next step."""
        return [member for member in self.membership.of("policy") if member.version == self.version]

    def may_policies_work(self) -> bool:
        """Say whether every policy has its devices."""
        return not self.turns.shared or all(map(self.turns.may_work, self.membership.of("policy")))

    def is_publishing(self) -> bool:
        """Say whether a policy is putting a version on offer. What rollouts offer again holds no publication up."""
        return any(self.leases.num(member.name, "publish") for member in self.membership.of("policy"))

    def setting(self, key: str, otherwise: float) -> float:
        """Return what an operator set `key` to, or what the plan says."""
        return self.changes.now(key, otherwise)

    def is_awaiting(self) -> bool:
        """Say whether a controller that has just begun again should wait for those who may hold work."""
        return bool(self.awaited) and self.now < self.await_until

    def required_version(self, group: Group) -> int:
        """Return the oldest version that may sample for a live group.

        The published version is the base of rank 0's step, so rank r's step has the base ``published + r // P``, of
        which at most `max_staleness` may be missing. No version is older than the first that this run publishes.
        """
        if not self.plan.has_policy:
            return 0
        base = self.rounds.version + self.ledger.rank(group) // self.plan.prompts_per_step
        return max(self.plan.num_supervised_steps, self.plan.begin_version, base - self.ledger.max_staleness)

    def newest_allowed(self, group: Group) -> int:
        """Return the newest version that a token of a live group can be of."""
        if group.purpose == "evaluate" and self.evaluation is not None:
            return self.evaluation.version
        return self.rounds.version

    # --- ways to act -----------------------------------------------------------------------------------------------

    def send(self, peer: str, message: wire.Down, buffers: Buffers = ()) -> None:
        """Say something that needs no answer."""
        self.out.append(Send(peer, message, buffers))

    def note(self, kind: str, **fields: Any) -> None:
        """Record something."""
        self.out.append(Note(kind, fields))

    def write(self, record: Record, payload: Buffers = ()) -> None:
        """Put something into the journal, before anything else that follows from this event is done."""
        self.written.append(Write(record, payload))

    def fetch(self, step: int) -> None:
        """Have the records of a committed step read."""
        self.fetching, self.fetched = step, None
        self.out.append(Fetch(step))

    def prune(self, step: int) -> None:
        """A policy could continue from version `step`: what it was made of is needed no more."""
        self.out.append(Prune(step))

    def welcome(self, member: Member) -> None:
        """Tell a replica that it is a member."""
        self.send(member.name, self.plan.welcome(member.role))

    def refuse(self, name: str, reason: str) -> None:
        """Tell a replica that it is no member, and why."""
        self.note("refused", replica=name, reason=reason)
        self.send(name, wire.Refused(reason=reason))

    def grant(
        self,
        member: Member,
        kind: LeaseKind,
        subject: int | str,
        command: Callable[[str], wire.LeasedCommand],
        buffers: Buffers = (),
        tokens: int = 0,
    ) -> str:
        """Give `member` a piece of work under a lease of its own; `tokens` are expected of a group to generate."""
        self._num_leases += 1
        lease = lease_id(kind, subject, self.incarnation, self._num_leases)
        send = Send(member.name, command(lease), buffers)
        self.out.append(send)
        self.leases.grant(lease, kind, member.name, send, self.now, self._patience_s[kind], tokens)
        self.update_free(member, kind)
        return lease

    def claim(self, member: Member, kind: LeaseKind, lease: str) -> None:
        """Put work in force that `member` had from an earlier incarnation of the controller, or before it was lost."""
        found = self.group_of(lease) if kind == "generate" else None
        tokens = found[1].expected_tokens if found is not None else 0
        self.leases.grant(lease, kind, member.name, None, self.now, self._patience_s[kind], tokens)
        self.update_free(member, kind)

    def release(self, peer: str, *leases: str) -> None:
        """Tell a replica to forget these leases."""
        if leases:
            self.send(peer, wire.ReleaseLeases(leases=leases))

    def update_free(self, member: Member, kind: str = "") -> None:
        """Note that the free slots of `member` changed: work of `kind` came or went, or it has another version."""
        if not kind or kind in TAKES_SLOT:
            self.capacity.changed[member.name] = member

    def up_to_date(self) -> SlotIndex:
        """Return who has how many free slots now."""
        capacity = self.capacity
        if capacity.changed:
            changed, capacity.changed = capacity.changed, {}
            num_rollouts = self.membership.num("rollout")
            for member in changed.values():
                if self.turns.shared and not self.turns.may_work(member):
                    capacity.drop(member, self.evaluation)
                elif member.told:
                    capacity.update(member, self.evaluation, num_rollouts)
        return capacity

    def group_of(self, lease: str) -> tuple[Groups, Group] | None:
        """Return the group that a generate, score or teach lease is about, and the book that it is in."""
        kind, _, rest = lease.partition(":")
        return self.find(rest.partition(":")[0]) if kind in TAKES_SLOT else None

    def find(self, key: str) -> tuple[Groups, Group] | None:
        """Return the live group of this key, and the book that it is in."""
        groups: Groups | None = self.ledger if key.startswith("t") else self.evaluation
        group = groups.get(int(key[1:])) if groups is not None and key[1:].isdigit() else None
        return (groups, group) if groups is not None and group is not None else None

    def num_completions(self, purpose: Purpose) -> int:
        """Return how many completions a group of this purpose has now."""
        if purpose == "evaluate" and self.evaluation is not None:
            return self.evaluation.num_completions
        return self.plan.num_completions(purpose)

    def sampling(self, purpose: Purpose) -> wire.Sampling:
        """Return how tokens are drawn for a group of this purpose now."""
        if purpose == "evaluate":
            return self.plan.eval_sampling
        return self._train_sampling

    def change(self, key: str, value: float, step: int, request: str) -> None:
        """Put a setting in force from `step` on; what concerns samples and slots, from now on."""
        self.changes.add(key, value, step, request)
        if key == "rl.max_staleness":
            self.ledger.max_staleness = int(value)
        elif key == "rl.max_tries":
            self.ledger.max_tries = int(value)
        elif key.startswith("sampling."):
            name = key.removeprefix("sampling.")
            number = int(value) if DYNAMIC[key].is_whole else value
            self._train_sampling = msgspec.structs.replace(self._train_sampling, **{name: number})

    # --- what is to be expected ------------------------------------------------------------------------------------

    def expected_tokens(self, prompt: wire.Prompt, purpose: Purpose, num_completions: int) -> int:
        """Return how many tokens the completions of a prompt will have together."""
        most = float(self.sampling(purpose).max_tokens)
        return max(1, round(num_completions * self.lengths.expected(prompt.id, purpose, most)))

    def rest(self, member: Member) -> None:
        """Give a rollout no group for a while: it gave one back, so it is about to leave, or has lost its engine."""
        self.capacity.resting[member.name] = self.now + self.plan.lease_s
        self.update_free(member)

    def wake_rested(self) -> None:
        """Let those have groups again whose rest is over."""
        for name in self.capacity.rested(self.now):
            self.update_free(self.membership.members[name])

    # --- who has which version -------------------------------------------------------------------------------------

    def holds(self, member: Member, version: int) -> None:
        """Note which version a rollout holds (-1 for none), and whether it needs another one."""
        self._let_go(member)
        if member.version < 0 <= version:  # whatever it gave groups back for, its engine is ready again
            self.capacity.resting.pop(member.name, None)
        member.version = version
        if version >= 0:
            self.holders.setdefault((version, member.host), {})[member.name] = None
        self.update_free(member)
        self.look_behind(member)

    def target(self, member: Member) -> int:
        """Return the version that a rollout is to have: the newest, or that of the evaluation that it is bound to."""
        evaluation = self.evaluation
        if evaluation is not None and member.name in evaluation.pinned:
            return evaluation.version
        return self.rounds.version

    def look_behind(self, member: Member) -> None:
        """Note whether a rollout needs another version than it has."""
        target = self.target(member)
        if member.version != target and target >= 0 and not self.leases.num(member.name, "adopt"):
            self.behind[member.name] = None
            self.due |= Dirty.ADOPT
        else:
            self.behind.pop(member.name, None)
        self.due |= Dirty.DISPATCH
        if self.evaluation is not None:
            self.loose[member.name] = None
            self.due |= Dirty.EVALUATE

    def _let_go(self, member: Member) -> None:
        held = self.holders.get((member.version, member.host))
        if held is not None:
            held.pop(member.name, None)
            if not held:
                del self.holders[member.version, member.host]

    # --- who goes --------------------------------------------------------------------------------------------------

    def lose(self, name: str, why: str, *, gone: bool = False) -> None:
        """Free everything that a replica had; what it answers later changes nothing. `gone`: it ended for certain."""
        dropped = self.leases.drop(name)
        self.requeue(dropped)
        self.behind.pop(name, None)
        self.awaited.discard(name)
        self.failing_since.pop(name, None)
        member = self.membership.leave(name)
        self.rounds.forget(name, member.layout if member is not None else None)
        if member is None:
            return
        if member.role == "rollout":
            self._let_go(member)
        self.capacity.forget(member, self.evaluation)
        self.turns.left(member, self.now, gone=gone)
        if self.evaluation is not None:
            self.evaluation.pinned.discard(name)
        if self.step is not None and self.step.shares.pop(name, None) is not None:
            self.step.broken = True
        self.write(MemberLeft(name=name))
        self.note("left", replica=name, reason=why, num_leases=len(dropped))
        self.due = Dirty.ALL

    def miss(self) -> None:
        """Wait no longer for those who were not heard since the controller's restart; the next one need not either."""
        for name in sorted(self.awaited):
            self.membership.left(name)
            self.write(MemberLeft(name=name))
            self.note("left", replica=name, reason="it was not heard after the controller's restart", num_leases=0)
        self.awaited.clear()

    def evict(self, member: Member, why: str) -> None:
        """Lose a replica that hangs or cannot be used, and let this incarnation of it not come back."""
        self.lose(member.name, why)
        self.membership.ban(member.name, member.epoch, why)
        self.refuse(member.name, why)

    def take_back(self, member: Member) -> None:
        """Free the groups that a rollout works on, since its weights are not what was published."""
        dropped = self.leases.drop(member.name, "generate")
        if dropped:
            self.release(member.name, *dropped)
            self.requeue(dropped)

    def requeue(self, dropped: list[str]) -> None:
        """Put the groups of these leases back to where they were before."""
        for lease in dropped:
            found, kind = self.group_of(lease), lease_kind(lease)
            if found is not None and kind is not None:
                groups, group = found
                groups.requeue(group, kind)
        if dropped:
            self.due |= Dirty.DISPATCH | Dirty.SCORE
