"""Who is in the run: replicas by name, each with its incarnation, what it holds, and when it was last heard."""

from __future__ import annotations

from dataclasses import dataclass, field

from starling.common.ids import Role
from starling.common.wire.messages import Hello, LeaseProgress
from starling.weightsync.layout import Layout


@dataclass
class Member:
    """One replica of the run."""

    name: str
    role: Role
    epoch: int
    num_slots: int
    heard_at: float
    version: int
    """Weight version in use, proven; -1 for none."""
    layout: Layout | None = None
    """How it lays out its weights; None for who has none."""
    gauges: dict[str, float] = field(default_factory=dict)
    progress: dict[str, LeaseProgress] = field(default_factory=dict)
    """By lease, as of the last heartbeat: it counts only for a lease that is still in force."""


@dataclass
class Membership:
    """The replicas that are in the run now."""

    lease_s: float
    members: dict[str, Member] = field(default_factory=dict)
    _epochs: dict[str, int] = field(default_factory=dict)

    def is_past(self, name: str, epoch: int) -> bool:
        """Say whether `name` has been started again since `epoch`: what that incarnation said counts no more."""
        return epoch < self._epochs.get(name, epoch)

    def refusal(self, name: str, hello: Hello) -> str | None:
        """Say why this replica may not join, or None when it may."""
        if hello.role == "controller":
            return "this run has its controller; a replica is a policy, a rollout or a reward"
        if name.rpartition("-")[0] != hello.role:
            return f"{name} is no name of a {hello.role}; it must be {hello.role}-<number>"
        if hello.role == "policy" and any(m.role == "policy" and m.name != name for m in self.members.values()):
            return "this run has its policy already; start one policy replica"
        if hello.role in ("policy", "rollout") and not hello.has_layout:
            return f"{name} did not say how it lays out its weights"
        if hello.role in ("rollout", "reward") and hello.num_slots < 1:
            return f"{name} offers {hello.num_slots} slots; it needs at least 1"
        return None

    def join(self, name: str, epoch: int, hello: Hello, layout: Layout | None, now: float) -> Member:
        """Admit a replica; a rollout holds no proven version before it has attested one."""
        known = self.members.get(name)
        version = known.version if known is not None and known.epoch == epoch else -1
        if hello.role == "policy":
            version = hello.version
        self._epochs[name] = epoch
        self.members[name] = Member(
            name=name,
            role=hello.role,
            epoch=epoch,
            num_slots=hello.num_slots,
            heard_at=now,
            version=version,
            layout=layout,
        )
        return self.members[name]

    def get(self, name: str, epoch: int) -> Member | None:
        """Return the member `name` if it is this incarnation of it."""
        member = self.members.get(name)
        return member if member is not None and member.epoch == epoch else None

    def leave(self, name: str) -> Member | None:
        """Remove a replica and return it."""
        return self.members.pop(name, None)

    def silent(self, now: float) -> list[str]:
        """Return the replicas whose lease has ended."""
        return [m.name for m in self.members.values() if now - m.heard_at > self.lease_s]

    def of(self, role: Role) -> list[Member]:
        """Return the replicas of `role`, in the order of their names."""
        return sorted((m for m in self.members.values() if m.role == role), key=lambda m: m.name)
