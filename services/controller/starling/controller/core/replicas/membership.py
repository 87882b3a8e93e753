"""Who is in the run: replicas by name, each with its incarnation, what it holds, and when it was last heard."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from starling.common.ids import Role
from starling.common.wire.messages import Hello, LeaseProgress, Wait
from starling.weightsync.plan.layout import Layout

KEPT_GONE = 4096
"""Of so many replicas that are gone it is known what they were."""
REPLICA_ROLES: tuple[Role, ...] = ("policy", "rollout", "reward", "teacher")


@dataclass(slots=True)
class Member:
    """One replica of the run."""

    name: str
    role: Role
    epoch: int
    num_slots: int
    heard_at: float
    version: int
    """Weight version in use, proven; -1 for none."""
    host: str = ""
    serves: bool = False
    """It can put its version on offer to others."""
    shares_steps: bool = False
    """It can do its share of a step beside other policies."""
    layout: Layout | None = None
    """How it lays out its weights; None for who has none."""
    gauges: dict[str, float] = field(default_factory=dict)
    progress: dict[str, LeaseProgress] = field(default_factory=dict)
    """By lease, as of the last heartbeat: it counts only for a lease that is still in force."""
    waits: tuple[Wait, ...] = ()
    told: bool = True
    """What it holds is known: it is new, or has said so since it came back."""


@dataclass
class Membership:
    """The replicas that are in the run now."""

    lease_s: float
    given: int = -1
    """A version that a rollout need not prove to hold, for all read it from the same folder; -1 for none."""
    members: dict[str, Member] = field(default_factory=dict)
    proven: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of each replica, also one that is gone: its incarnation, and the version that this one proved to hold."""
    _epochs: dict[str, int] = field(default_factory=dict)
    """Of each replica, also one that is gone: its newest incarnation."""
    _by_role: dict[Role, dict[str, Member]] = field(default_factory=lambda: {role: {} for role in REPLICA_ROLES})
    _heard: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """Names, the one heard longest ago first."""
    _banned: dict[str, tuple[int, str]] = field(default_factory=dict)
    _gone: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """Names of those that left, the one that left longest ago first."""

    def is_past(self, name: str, epoch: int) -> bool:
        """Say whether `name` has been started again since `epoch`: what that incarnation said counts no more.

        Only while the later one is a member: epochs come from clocks, and a clock that is set back must not keep a
        replica out for longer than the lease of the one before it.
        """
        member = self.members.get(name)
        return member is not None and epoch < member.epoch

    def hear(self, member: Member, now: float) -> None:
        """Note that a member said something."""
        member.heard_at = now
        self._heard.move_to_end(member.name)

    def refusal(self, name: str, epoch: int, hello: Hello) -> str | None:
        """Say why this replica may not join, or None when it may."""
        if hello.role not in REPLICA_ROLES:
            return f"a {hello.role} does not join a run; a replica is a policy, a rollout, a reward or a teacher"
        if name.rpartition("-")[0] != hello.role:
            return f"{name} is no name of a {hello.role}; it must be {hello.role}-<number>"
        banned = self._banned.get(name)
        if banned is not None and banned[0] == epoch:
            return banned[1]
        others = [m for m in self._by_role["policy"].values() if m.name != name] if hello.role == "policy" else []
        if others and not (hello.shares_steps and all(m.shares_steps for m in others)):
            return (
                f"this run has its policy already, {others[0].name}, and {name} cannot share steps with it; "
                "start one policy replica"
            )
        if hello.role in ("policy", "rollout") and not hello.has_layout:
            return f"{name} did not say how it lays out its weights"
        if hello.role in ("rollout", "reward", "teacher") and hello.num_slots < 1:
            return f"{name} offers {hello.num_slots} slots; it needs at least 1"
        return None

    def join(self, name: str, epoch: int, hello: Hello, layout: Layout | None, now: float) -> Member:
        """Admit a replica; a rollout holds the version that this very incarnation of it has proven, if any."""
        proven_epoch, version = self.proven.get(name, (epoch, -1))
        if hello.role == "policy":
            version = hello.version
        elif proven_epoch != epoch or hello.version != version:
            version = hello.version if hello.version == self.given else -1
        known = self.was_here(name, epoch)
        self._epochs[name] = epoch
        self._banned.pop(name, None)
        member = Member(
            name=name,
            role=hello.role,
            epoch=epoch,
            num_slots=hello.num_slots,
            heard_at=now,
            version=version,
            host=hello.host,
            serves=hello.serves,
            shares_steps=hello.shares_steps,
            layout=layout,
            told=not known,
        )
        self.members[name] = self._by_role[hello.role][name] = member
        self._gone.pop(name, None)
        self._heard[name] = None
        self._heard.move_to_end(name)
        return member

    def was_here(self, name: str, epoch: int) -> bool:
        """Say whether this incarnation of `name` has been a member, now or before."""
        return self._epochs.get(name) == epoch or self.proven.get(name, (-1, -1))[0] == epoch

    def remember(self, name: str, epoch: int) -> None:
        """Note that this incarnation was a member before the controller's restart, and may hold work."""
        self._epochs[name] = epoch
        self._gone.pop(name, None)

    def prove(self, member: Member, version: int) -> None:
        """Note that a rollout has proven to hold `version`."""
        self.proven[member.name] = (member.epoch, version)

    def get(self, name: str, epoch: int) -> Member | None:
        """Return the member `name` if it is this incarnation of it."""
        member = self.members.get(name)
        return member if member is not None and member.epoch == epoch else None

    def leave(self, name: str) -> Member | None:
        """Remove a replica and return it."""
        member = self.members.pop(name, None)
        if member is not None:
            del self._by_role[member.role][name]
            del self._heard[name]
            self.left(name)
        return member

    def left(self, name: str) -> None:
        """Note that `name` is gone: what is known of it is kept for a while."""
        self._gone[name] = None
        self._gone.move_to_end(name)
        while len(self._gone) > KEPT_GONE:
            oldest, _ = self._gone.popitem(last=False)
            for known in (self.proven, self._epochs, self._banned):
                known.pop(oldest, None)

    def ban(self, name: str, epoch: int, reason: str) -> None:
        """Let this incarnation of `name` not join again."""
        self._banned[name] = (epoch, reason)

    def silent(self, now: float) -> list[str]:
        """Return the replicas whose lease has ended."""
        names = []
        for name in self._heard:
            if now - self.members[name].heard_at <= self.lease_s:
                break
            names.append(name)
        return names

    def of(self, role: Role) -> list[Member]:
        """Return the replicas of `role`, in the order of their names."""
        members = self._by_role[role]
        return [members[name] for name in sorted(members)]

    def num(self, role: Role) -> int:
        """Return how many replicas of `role` there are."""
        return len(self._by_role[role])
