"""Time sharing of colocated devices (`launch.colocate`): which side has the devices, and which replicas sleep.

    awake --Sleep--> unknown --Slept--> asleep --Wake--> unknown --Woken--> awake
      (a replica that joins, returns or meets a restarted controller is unknown until it answers such a command)

No replica is woken before every replica of the other side has answered that it sleeps. A replica that was lost without
a goodbye may still be awake. The waking side waits for it until it returns, or until enough leases have passed that it
must have fallen asleep without a controller, or be dead (see `starling.common.leases.membership`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

from starling.common.leases.membership import DEVICE_GRACE_LEASES
from starling.controller.core.replicas.membership import Member

DeviceRole = Literal["policy", "rollout"]
DEVICE_ROLES: Final[tuple[DeviceRole, DeviceRole]] = ("policy", "rollout")
RETRY_S: Final = 1.0
"""Seconds after which a failed sleep or wake is retried."""


class DeviceState(enum.Enum):
    """Whether a replica has the shared devices."""

    UNKNOWN = "unknown"
    """It joined, or has not answered the last command yet."""
    AWAKE = "awake"
    ASLEEP = "asleep"


DEVICE_TRANSITIONS: Final[dict[tuple[DeviceState, DeviceState], str]] = {
    (DeviceState.UNKNOWN, DeviceState.AWAKE): "answered Wake",
    (DeviceState.UNKNOWN, DeviceState.ASLEEP): "answered Sleep",
    (DeviceState.AWAKE, DeviceState.UNKNOWN): "is sent Sleep, or joined anew, or left",
    (DeviceState.ASLEEP, DeviceState.UNKNOWN): "is sent Wake, or joined anew, or left",
    (DeviceState.UNKNOWN, DeviceState.UNKNOWN): "is sent Sleep or Wake again, or joined anew, or left",
}
"""Every legal transition, with its cause."""


@dataclass
class TimeSharing:
    """Which replicas have the devices. Where no devices are shared, every replica is awake."""

    shared: bool
    lease_s: float
    num_policies: int = 1
    """That the run is started with."""
    active: DeviceRole = "policy"
    """The side that has the devices, or gets them next. Policies begin: the first version must be published."""
    waited_at: float | None = None
    """When policies were last seen to wait for rollouts to sleep; None if they do not."""
    _not_before: dict[DeviceRole, float] = field(default_factory=dict)
    """By side: until when a replica may be awake that was lost before the controller's restart."""
    _states: dict[str, DeviceState] = field(default_factory=dict)
    """By name; a replica that is not listed is unknown."""
    _lost: dict[str, tuple[DeviceRole, float]] = field(default_factory=dict)
    """Replicas that left and may still be awake, and until when."""
    _retry_at: dict[str, float] = field(default_factory=dict)
    """Replicas whose last sleep or wake failed, and when it is tried again."""

    @property
    def inactive(self) -> DeviceRole:
        """The side that is to sleep."""
        return DEVICE_ROLES[self.active == "policy"]

    def has_devices(self, member: Member) -> bool:
        """Say whether a member has its devices."""
        if not self.shared or member.role not in DEVICE_ROLES:
            return True
        return member.role == self.active and self._states.get(member.name) is DeviceState.AWAKE

    def is_asleep(self, member: Member) -> bool:
        """Say whether a member has released its devices."""
        return self._states.get(member.name) is DeviceState.ASLEEP

    def _move(self, name: str, state: DeviceState) -> None:
        before = self._states.get(name, DeviceState.UNKNOWN)
        assert (before, state) in DEVICE_TRANSITIONS, f"{name} may not go from {before} to {state}"
        if state is DeviceState.UNKNOWN:
            self._states.pop(name, None)
        else:
            self._states[name] = state

    def reset(self, member: Member) -> None:
        """Note that a member joined, or was sent Sleep or Wake: its state is unknown until it answers."""
        self._move(member.name, DeviceState.UNKNOWN)
        self._lost.pop(member.name, None)
        self._retry_at.pop(member.name, None)

    def note_failure(self, member: Member, now: float) -> None:
        """Note that a member could not sleep, or not wake."""
        self._retry_at[member.name] = now + RETRY_S

    def may_command(self, member: Member, now: float) -> bool:
        """Say whether a member can be sent Sleep or Wake: none has failed just now."""
        return now >= self._retry_at.get(member.name, now)

    def note_answer(self, member: Member, *, asleep: bool) -> None:
        """Note that a member has fallen asleep, or has woken up."""
        self.reset(member)
        self._move(member.name, DeviceState.ASLEEP if asleep else DeviceState.AWAKE)

    def remove(self, member: Member, now: float, *, ended: bool) -> None:
        """Remove a member that left. `ended`: its process has ended for certain."""
        was_asleep = self.is_asleep(member)
        self.reset(member)
        if self.shared and not ended and not was_asleep:
            for side in DEVICE_ROLES:
                if member.role == side:
                    self._lost[member.name] = side, now + DEVICE_GRACE_LEASES[side] * self.lease_s

    def restart(self, now: float) -> None:
        """Begin after a restart of the controller: any earlier replica may be awake."""
        self._not_before = {side: now + DEVICE_GRACE_LEASES[side] * self.lease_s for side in DEVICE_ROLES}

    def obstacle(self, others: Iterable[Member], now: float) -> str:
        """Return the replicas that keep the active side from waking; empty when there is none.

        `others`: the members of the inactive side.
        """
        others = list(others)
        awake = self.awake(others, now)
        # Once as many policies have joined as the run has, none from before the restart is missing.
        is_missing = self.inactive == "policy" and len(others) < self.num_policies
        unknown: DeviceRole = "policy" if is_missing else "rollout"
        if now < self._not_before.get(unknown, now):
            return "replicas that were lost before the controller's restart"
        return ", ".join(awake)

    def awake(self, others: Iterable[Member], now: float) -> list[str]:
        """Return the replicas of the inactive side, `others` and some that were lost, that may have the devices."""
        self._lost = {name: (side, until) for name, (side, until) in self._lost.items() if until > now}
        awake = [member.name for member in others if not self.is_asleep(member)]
        return awake + sorted(name for name, (side, _) in self._lost.items() if side == self.inactive)
