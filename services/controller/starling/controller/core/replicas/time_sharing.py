"""Whose turn it is on devices that policies and rollouts share (`launch.colocate`), and who sleeps.

    awake --Sleep--> unknown --Slept--> asleep --Wake--> unknown --Awake--> awake
      (who joins, returns or is taken over by another controller is unknown: it is told again, and answers again)

Nobody is told to wake before everybody of the other side has said that it sleeps. Who is lost without a farewell may be
awake all the same: until it comes back, or so many leases have passed that it must have fallen asleep by itself, or be
gone, for want of the controller (see `starling.common.membership`), the others sleep on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

from starling.common.membership import DEVICE_GRACE_LEASES
from starling.controller.core.replicas.membership import Member

DeviceRole = Literal["policy", "rollout"]
SIDES: Final[tuple[DeviceRole, DeviceRole]] = ("policy", "rollout")
AGAIN_S: Final = 1.0
"""Who could not sleep, or not wake, is told again after so long."""


@dataclass
class TimeSharing:
    """Who has the devices. Where everybody has devices of its own, everybody is awake."""

    shared: bool
    lease_s: float
    side: DeviceRole = "policy"
    """Whose turn it is, or is about to be: the first version must be published."""
    _not_before: dict[DeviceRole, float] = field(default_factory=dict)
    """Until when somebody of a side may be awake who was lost before the controller's restart."""
    _awake: set[str] = field(default_factory=set)
    _asleep: set[str] = field(default_factory=set)
    _lost: dict[str, tuple[DeviceRole, float]] = field(default_factory=dict)
    """Who may be awake though it is no member any more, and until when."""
    _refused: dict[str, float] = field(default_factory=dict)
    """Who could not do what it was told, and until when it is left alone."""

    @property
    def other(self) -> DeviceRole:
        """The side whose turn it is not."""
        return SIDES[self.side == "policy"]

    def may_work(self, member: Member) -> bool:
        """Say whether a member has its devices."""
        if not self.shared or member.role not in SIDES:
            return True
        return member.role == self.side and member.name in self._awake

    def sleeps(self, member: Member) -> bool:
        """Say whether a member has given its devices away."""
        return member.name in self._asleep

    def told(self, member: Member) -> None:
        """A member joined, or was told to sleep or to wake: until it answers, nobody knows."""
        self._awake.discard(member.name)
        self._asleep.discard(member.name)
        self._lost.pop(member.name, None)
        self._refused.pop(member.name, None)

    def refused(self, member: Member, now: float) -> None:
        """A member could not do what it was told."""
        self._refused[member.name] = now + AGAIN_S

    def may_be_told(self, member: Member, now: float) -> bool:
        """Say whether a member can be told to sleep or to wake."""
        return now >= self._refused.get(member.name, now)

    def answered(self, member: Member, *, sleeps: bool) -> None:
        """A member has done what it was told."""
        self.told(member)
        (self._asleep if sleeps else self._awake).add(member.name)

    def left(self, member: Member, now: float, *, gone: bool) -> None:
        """A member is none any more; `gone`: it has ended for certain."""
        slept = self.sleeps(member)
        self.told(member)
        if self.shared and not gone and not slept:
            for side in SIDES:
                if member.role == side:
                    self._lost[member.name] = side, now + DEVICE_GRACE_LEASES[side] * self.lease_s

    def begin_again(self, now: float) -> None:
        """The controller was started again: what was before, only the members can tell."""
        self._not_before = {side: now + DEVICE_GRACE_LEASES[side] * self.lease_s for side in SIDES}

    def obstacle(self, others: Iterable[Member], now: float) -> str:
        """Say who keeps those whose turn it is from waking; empty when nobody does."""
        others = list(others)
        # There is one policy, mostly: who has come is the one that was.
        unknown: DeviceRole = "policy" if self.other == "policy" and not others else "rollout"
        if now < self._not_before.get(unknown, now):
            return "whoever was lost before the controller's restart"
        self._lost = {name: (side, until) for name, (side, until) in self._lost.items() if until > now}
        awake = [member.name for member in others if not self.sleeps(member)]
        return ", ".join(awake + sorted(name for name, (side, _) in self._lost.items() if side == self.other))
