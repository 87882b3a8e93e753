"""Who may be given more work: replicas with a free slot, by what they hold, have in hand, and are fast at.

All of it is derived from the leases in force. Most events change those of somebody, and few then ask who is free: who
changed is noted, and looked at when somebody asks.
"""

from __future__ import annotations

from starling.common.ids import lease_subject
from starling.controller.core.evaluation import Evaluation, slots_of
from starling.controller.core.expect import Rates
from starling.controller.core.free import Free
from starling.controller.core.leases import Leases
from starling.controller.core.membership import Member
from starling.controller.core.routing import Routing


class Capacity:
    """The free slots of rollouts, rewards and teachers."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self.routing = Routing()
        """Rollouts, for groups to train."""
        self.rewards, self.teachers = Free(), Free()
        self.rates = Rates()
        self.resting: dict[str, float] = {}
        """Rollouts that get no group for now, and until when."""
        self.changed: dict[str, Member] = {}
        """Whose work or version changed since `update` was called for it."""

    def update(self, member: Member, evaluation: Evaluation | None, num_rollouts: int) -> None:
        """Note how many slots `member` has free, after its work or its version changed."""
        if member.role == "reward":
            self.rewards.put(member, self._leases.num(member.name, "score"))
        elif member.role == "teacher":
            self.teachers.put(member, self._leases.num(member.name, "teach"))
        elif member.role == "rollout":
            if member.name in self.resting:
                self.drop(member, evaluation)
                return
            busy, queued = self._leases.num(member.name, "generate"), self._leases.num_tokens(member.name)
            speed = member.num_slots * self.rates.rate(member.name)
            self.routing.put(member, busy, member.num_slots, queued=queued, speed=speed)
            if evaluation is not None and member.name in evaluation.pinned:
                self._update_for(evaluation, member, busy, num_rollouts)

    def rested(self, now: float) -> list[str]:
        """Return whose rest is over, and let it be over."""
        names = [name for name, until in self.resting.items() if until <= now]
        for name in names:
            del self.resting[name]
        return names

    def forget(self, member: Member, evaluation: Evaluation | None) -> None:
        """`member` is gone; who comes back under that name may run on another machine."""
        self.drop(member, evaluation)
        self.rates.forget(member.name)
        self.resting.pop(member.name, None)

    def drop(self, member: Member, evaluation: Evaluation | None) -> None:
        """Give `member` nothing until it changes."""
        self.changed.pop(member.name, None)
        for free in (self.routing, self.rewards, self.teachers):
            free.drop(member)
        if evaluation is not None:
            evaluation.free.drop(member)

    def _update_for(self, evaluation: Evaluation, member: Member, busy: int, num_rollouts: int) -> None:
        if member.version != evaluation.version:
            evaluation.free.drop(member)
            return
        slots = slots_of(member, num_rollouts)
        held = self._leases.of(member.name, "generate")
        num = sum(lease_subject(lease).startswith("e") for lease in held) if busy < member.num_slots else slots
        queued, speed = self._leases.num_tokens(member.name), slots * self.rates.rate(member.name)
        evaluation.free.put(member, num, slots, queued=queued, speed=speed)
