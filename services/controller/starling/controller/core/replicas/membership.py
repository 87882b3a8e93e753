"""Membership: the replicas of the run by name, with incarnation, held version, and the time of their last message."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from starling.common.counts import counted
from starling.common.ids import Role
from starling.common.ranges import MAX_SLOTS
from starling.common.wire.messages import Hello, LeaseProgress, ModelLimits, Wait
from starling.controller.core.allowance import Allowances
from starling.controller.core.replicas.blame import PairCounts
from starling.weightsync.plan.layout import Layout

MAX_GONE = 4096
"""Departed replicas whose incarnation and proven version are remembered."""
MAX_INVALID = 3
"""How often a replica may be counted as invalid, over all its incarnations, before this name is refused."""
HELLO_BURST: Final = 64.0
"""Answers to the hellos of one name, by which it joins or is refused, at once, and below on average: beyond them its
hellos are ignored. Each takes two lines of metrics.jsonl and of the log."""
HELLOS_PER_S: Final = 1 / 30
LAYOUT_BYTES_PER_HELLO: Final = 8 << 20
"""A hello counts once more for each so many bytes of its layout, which take time to decode."""
LAYOUT_PARTS_PER_HELLO: Final = 1 << 15
"""And once more for each so many tensors and boxes: a million small boxes, in 15 MiB, take 5 s to decode."""
MAX_HOST_CHARACTERS = 255
"""As in the DNS."""
MAX_PEER_CHARACTERS = MAX_HOST_CHARACTERS + 6
"""A host and a port."""
REPLICA_ROLES: tuple[Role, ...] = ("policy", "rollout", "reward", "teacher")


@dataclass(slots=True)
class Member:
    """One replica of the run."""

    name: str
    role: Role
    incarnation: int
    num_slots: int
    heard_at: float
    version: int
    """Weight version in use, proven; -1 for none."""
    host: str = ""
    can_offer: bool = False
    """It can offer the version that it holds to others."""
    serves: bool = False
    """Its engine can offer what it holds: it could, if it were trusted."""
    may_relay: bool = True
    """Others may read the version that it pulls from it. False after one has read other weights than were published."""
    peer: str = ""
    """Policy: where others find it that make steps together with it; empty for one that trains alone."""
    settings_digest: str = ""
    """Policy: of the settings that decide what a step computes."""
    limits: ModelLimits | None = None
    """Policy: what its model can read of groups; None in a run without steps of groups."""
    layout: Layout | None = None
    """Layout of its weights; None for a replica without weights."""
    checkpoint: str = ""
    """Of a rollout in a run without a policy: the digest of the model folder that it has loaded; empty if unknown."""
    gauges: dict[str, float] = field(default_factory=dict)
    progress: dict[str, LeaseProgress] = field(default_factory=dict)
    """By lease, as of the last heartbeat: valid only for a lease that is still in force."""
    waits: tuple[Wait, ...] = ()
    has_reported: bool = True
    """Its leases are known: it is new, or has sent a heartbeat since it came back."""

    @property
    def shares_steps(self) -> bool:
        """Whether it can make steps together with other policies."""
        return bool(self.peer)

    @property
    def is_follower(self) -> bool:
        """Whether it is a rollout that gets no work: it adopts the versions of the run to serve requests."""
        return self.role == "rollout" and not self.num_slots


@dataclass(slots=True)
class Conduct:
    """What the answers of one replica have led to, over all its incarnations since the controller started."""

    num_used: int = 0
    """Groups to which its answers are of use."""
    num_spoiled: int = 0
    """Groups that were thrown away because of its answers."""
    excess: int = 0
    """How many more groups were spoiled than used, never below 0."""
    balance_s: float = 0.0
    """Seconds for which it had the groups that it answered, less those for which it had others: a sum over groups."""
    wasted_s: float = 0.0
    """Seconds for which it had groups without a result, since `balance_s` was last positive."""
    wasted_until: float = float("-inf")
    """The end of that time so far."""
    is_idle: bool = False
    """It was too long."""

    def note_wasted(self, begin: float, end: float) -> None:
        """Add a time for which it had groups without a result; where such times overlap, they count once."""
        self.wasted_s += max(0.0, end - max(begin, self.wasted_until))
        self.wasted_until = end

    def note_used(self) -> None:
        """Note that an answer to a group is of use."""
        self.num_used += 1
        self.excess = max(0, self.excess - 1)

    def note_spoiled(self, *, was_used: bool = False) -> None:
        """Note that a group was thrown away because of an answer; `was_used`: after it had counted as used."""
        self.num_spoiled += 1
        self.num_used -= was_used
        self.excess += 1 + was_used


@dataclass
class Membership:
    """The replicas that are in the run now."""

    lease_s: float
    initial_version: int = -1
    """A version that a rollout need not prove, because all rollouts read it from the same folder; -1 for none."""
    members: dict[str, Member] = field(default_factory=dict)
    proven: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By replica, also after it left: its incarnation, and the version that this incarnation has proven to hold."""
    awaited: set[str] = field(default_factory=set)
    """Members as of the journal, not heard from since the controller's restart: they may hold work."""
    await_until: float = float("-inf")
    """When the controller stops waiting for them."""
    num_invalid: Counter[str] = field(default_factory=Counter)
    """By replica, of all its incarnations since the run began or was last stopped: its invalid results and offers, how
    often it kept groups until their deadline, or left for as long, without an answer, how often its answers spoiled the
    groups of some steps, and how often it alone could not adopt weights."""
    conduct: defaultdict[str, Conduct] = field(default_factory=lambda: defaultdict(Conduct))
    """By replica, also after it left."""
    unscored: dict[Role, PairCounts] = field(default_factory=lambda: {"reward": PairCounts(), "teacher": PairCounts()})
    """By role of the scorers: groups that they could not score, and that they could."""
    set_aside: dict[str, float] = field(default_factory=dict)
    """Replicas, also after they left, that get no work because their groups come to nothing, and until when."""
    hellos: Allowances = field(default_factory=lambda: Allowances(HELLO_BURST, HELLOS_PER_S))
    """By replica: hellos that are answered."""
    accusers: dict[str, bool] = field(default_factory=dict)
    """Rollouts, also after they left, that said to have pulled other weights from a rollout than were published, and
    whether one was evicted because of that: only then does the journal have it."""
    accused: dict[str, None] = field(default_factory=dict)
    """Rollouts, also after they left, that were evicted because of that. They offer no more."""
    num_bad_offers: Counter[str] = field(default_factory=Counter)
    """By rollout, of all its incarnations: how often it was told to offer no more, because others waited in vain."""
    num_stopped: Counter[str] = field(default_factory=Counter)
    """By rollout, of all its incarnations: how many others were told to offer no more after a failed pull of it."""
    offer_wait_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By rollout, of all its incarnations: seconds for which it was to offer weights and did not, less those of its
    offers, never below 0."""
    awake_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By rollout, of all its incarnations: seconds for which policies waited for it to sleep, since it did last."""
    adopting_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Likewise: for which they waited for it to adopt weights, since it has proven a version."""
    missing_since: float | None = None
    """Since when a role that the run needs has had no replica."""
    _incarnations: dict[str, int] = field(default_factory=dict)
    """By replica, also after it left: its newest incarnation."""
    _by_role: dict[Role, dict[str, Member]] = field(default_factory=lambda: {role: {} for role in REPLICA_ROLES})
    _followers: dict[str, Member] = field(default_factory=dict)
    """Rollouts without slots, which are not among those of their role."""
    _none_expires_until: float = float("-inf")
    """No membership lease ends before, as of the last look at all of them: a later message only extends one."""
    _banned: dict[str, tuple[int, str]] = field(default_factory=dict)
    _gone: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """Names of replicas that left, in the order in which they left."""

    def is_stale(self, name: str, incarnation: int) -> bool:
        """Say whether a later incarnation of `name` is a member: messages of this one are then ignored.

        Only while the later one is a member: incarnations come from clocks, and a clock that is set back must not
        keep a replica out for longer than the lease of its predecessor.
        """
        member = self.members.get(name)
        return member is not None and incarnation < member.incarnation

    def is_set_aside(self, name: str, now: float) -> bool:
        """Say whether a replica gets no work because its groups come to nothing."""
        return self.set_aside.get(name, now) > now

    def works_without(self, name: str, now: float) -> bool:
        """Say whether a replica may be set aside, because another one of its role gets work."""
        others = [one.name for one in self.of(self.members[name].role) if one.name != name]
        return not all(self.is_set_aside(other, now) for other in others)

    def end_set_aside(self, role: Role, now: float, end: Callable[[str, float], None]) -> None:
        """Let replicas work again, by `end`, if all that are left of a role are set aside."""
        if not self.set_aside:
            return  # else each of thousands of departures would look at all others
        left = [member.name for member in self.of(role)]
        if all(self.is_set_aside(name, now) for name in left):
            for name in left:
                del self.set_aside[name]
                end(name, now)

    def refusal(self, name: str, incarnation: int, hello: Hello) -> str | None:
        """Return why this replica may not join, or None when it may."""
        if hello.role not in REPLICA_ROLES:
            return f"a {hello.role} does not join a run; a replica is a policy, a rollout, a reward or a teacher"
        if name.rpartition("-")[0] != hello.role:
            return f"{name} is not the name of a {hello.role}; it must be {hello.role}-<number>"
        if len(hello.host) > MAX_HOST_CHARACTERS:
            return f"{name} has a host name of {len(hello.host)} characters; it may have {MAX_HOST_CHARACTERS}"
        longest = max(map(len, (hello.peer, hello.settings_digest, hello.checkpoint)))
        if longest > MAX_PEER_CHARACTERS:
            return f"{name} has an address or a digest of {longest} characters; it may have {MAX_PEER_CHARACTERS}"
        if hello.peer and hello.role != "policy":
            return f"{name} offers to share steps, which only policies can"
        banned = self._banned.get(name)
        if banned is not None and banned[0] == incarnation:
            return banned[1]
        if self.num_invalid[name] >= MAX_INVALID and self._by_role[hello.role].keys() - {name}:
            return (
                f"{name} has sent an invalid result, or none in time, {counted(self.num_invalid[name], 'time')}; start "
                "a replica of another name in its place, or stop the run and resume it"
            )
        if hello.role == "policy":
            problem = self._policy_refusal(name, hello)
            if problem is not None:
                return problem
        if hello.role in ("policy", "rollout") and not hello.has_layout:
            return f"{name} did not send the layout of its weights"
        least = 1 if hello.role in ("reward", "teacher") else 0
        if hello.num_slots < least:
            return f"{name} offers {counted(hello.num_slots, 'slot')}; it needs at least {least}"
        if hello.num_slots > MAX_SLOTS:
            return f"{name} offers {counted(hello.num_slots, 'slot')}; set its num_slots to at most {MAX_SLOTS}"
        return None

    def _policy_refusal(self, name: str, hello: Hello) -> str | None:
        """Return why a policy cannot make steps together with those that are there, or None when it can."""
        others = [member for member in self._by_role["policy"].values() if member.name != name]
        if others and not (hello.peer and all(member.shares_steps for member in others)):
            return (
                f"this run has its policy already, {others[0].name}, and {name} cannot share steps with it; start one "
                "policy replica, or all of them with policy.parallel.elastic = true"
            )
        for member in others:
            if member.settings_digest != hello.settings_digest:
                return (
                    f"{name} has other settings of [policy], [model] or run.seed, another config.json of its model or "
                    f"other versions of packages than {member.name}, whose steps it would share; start it with the "
                    "same recipe, model folder and installation"
                )
            if member.limits != hello.limits:
                return (
                    f"{name} has a model that reads other groups than that of {member.name}, whose steps it would "
                    "share (vocabulary, length or images); start it with the same model folder"
                )
        return None

    def join(self, name: str, incarnation: int, hello: Hello, layout: Layout | None, now: float) -> Member:
        """Admit a replica. A rollout holds the version that this incarnation of it has proven, if any."""
        proven_incarnation, version = self.proven.get(name, (incarnation, -1))
        if hello.role == "policy":
            version = hello.version
        elif proven_incarnation != incarnation or hello.version != version:
            version = hello.version if hello.version == self.initial_version else -1
        known = self.was_member(name, incarnation)
        self._incarnations[name] = incarnation
        self._banned.pop(name, None)
        member = Member(
            name=name,
            role=hello.role,
            incarnation=incarnation,
            num_slots=hello.num_slots,
            heard_at=now,
            version=version,
            host=hello.host,
            can_offer=hello.serves and self._is_trusted(name),
            serves=hello.serves,
            may_relay=self._is_trusted(name),
            peer=hello.peer,
            settings_digest=hello.settings_digest,
            limits=hello.limits if hello.role == "policy" else None,
            layout=layout,
            checkpoint=hello.checkpoint,
            has_reported=not known,
        )
        self.members[name] = self._kin(member)[name] = member
        self._gone.pop(name, None)
        return member

    def _is_trusted(self, name: str) -> bool:
        """Say whether others may still read weights from a rollout."""
        return name not in self.accused and self.num_bad_offers[name] < MAX_INVALID

    def was_member(self, name: str, incarnation: int) -> bool:
        """Say whether this incarnation of `name` is or was a member."""
        return self._incarnations.get(name) == incarnation or self.proven.get(name, (-1, -1))[0] == incarnation

    def restore(self, name: str, incarnation: int) -> None:
        """Note that this incarnation was a member before the controller's restart, and may hold work."""
        self.awaited.add(name)
        self._incarnations[name] = incarnation
        self._gone.pop(name, None)

    def is_awaiting(self, now: float) -> bool:
        """Say whether a restarted controller should still wait for the replicas from before its restart."""
        return bool(self.awaited) and now < self.await_until

    def prove(self, member: Member, version: int) -> None:
        """Note that a rollout has proven to hold `version`."""
        self.adopting_s.pop(member.name, None)
        self.proven[member.name] = (member.incarnation, version)

    def get(self, name: str, incarnation: int) -> Member | None:
        """Return the member `name` if it is of this incarnation."""
        member = self.members.get(name)
        return member if member is not None and member.incarnation == incarnation else None

    def remove(self, name: str) -> Member | None:
        """Remove a replica and return it."""
        member = self.members.pop(name, None)
        if member is not None:
            del self._kin(member)[name]
            self.note_gone(name)
        return member

    def note_gone(self, name: str) -> None:
        """Note that `name` has left. What is known of it is kept for a while."""
        self._gone[name] = None
        self._gone.move_to_end(name)
        while len(self._gone) > MAX_GONE:
            oldest, _ = self._gone.popitem(last=False)
            for known in (
                self.proven,
                self._incarnations,
                self._banned,
                self.num_invalid,
                self.conduct,
                self.set_aside,
                self.accusers,
                self.accused,
                self.num_bad_offers,
                self.num_stopped,
                self.offer_wait_s,
                self.awake_s,
                self.adopting_s,
            ):
                known.pop(oldest, None)

    def forgive(self) -> None:
        """Forget what replicas have done wrong."""
        for known in (self.num_invalid, self.accused, self.accusers):
            known.clear()

    def known_incarnations(self) -> dict[str, int]:
        """Return the newest incarnation of each replica, also after it left."""
        return dict(self._incarnations)

    def names_gone(self) -> tuple[str, ...]:
        """Return the replicas that left, in the order in which they left."""
        return tuple(self._gone)

    def restore_all(
        self,
        awaited: Iterable[str],
        incarnations: Mapping[str, int],
        proven: Mapping[str, tuple[int, int]],
        gone: Iterable[str],
    ) -> None:
        """Take over what was known of all replicas before the controller's restart."""
        self.awaited, self._incarnations, self.proven = set(awaited), dict(incarnations), dict(proven)
        self._gone = OrderedDict.fromkeys(gone)

    def ban(self, name: str, incarnation: int, reason: str) -> None:
        """Refuse this incarnation of `name` from now on."""
        self._banned[name] = (incarnation, reason)

    def expired(self, now: float) -> list[str]:
        """Return the replicas whose membership lease has ended, the one that was silent for longest first."""
        if now <= self._none_expires_until:
            return []
        heard = sorted([(member.heard_at, name) for name, member in self.members.items()])
        silent = [name for heard_at, name in heard if now - heard_at > self.lease_s]
        self._none_expires_until = (heard[len(silent)][0] if len(silent) < len(heard) else now) + self.lease_s
        return silent

    def _kin(self, member: Member) -> dict[str, Member]:
        return self._followers if member.is_follower else self._by_role[member.role]

    def of(self, role: Role) -> list[Member]:
        """Return the replicas of `role`, in the order of their names; of the rollouts those that take work."""
        members = self._by_role[role]
        return [members[name] for name in sorted(members)]

    def num(self, role: Role) -> int:
        """Return how many replicas `of` returns."""
        return len(self._by_role[role])

    def has_another(self, member: Member) -> bool:
        """Say whether there is a replica that can work in the place of `member`."""
        return self.num(member.role) > (0 if member.is_follower else 1)

    @property
    def has_adopters(self) -> bool:
        """Whether there is any rollout."""
        return bool(self._by_role["rollout"] or self._followers)

    def adopters(self) -> list[Member]:
        """Return all rollouts, also those that only follow the run, in the order of their names."""
        members = {**self._by_role["rollout"], **self._followers} if self._followers else self._by_role["rollout"]
        return [members[name] for name in sorted(members)]
