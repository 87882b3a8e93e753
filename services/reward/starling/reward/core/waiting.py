"""Groups with latents that wait until there is memory for them, in the order of their arrival. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from starling.common.wire.messages import ScoreGroup
from starling.reward.core.media import MediaForm


@dataclass(frozen=True, slots=True)
class WaitingGroup:
    """A group, with its latents as they came."""

    message: ScoreGroup
    form: MediaForm
    """Of the latents of each completion."""
    latents: bytes
    pixel_bytes: int
    """What the pixels take that may be made of them."""
    arrived_at: float
    """Monotonic seconds."""

    @property
    def needed_bytes(self) -> int:
        """What it takes in memory for media."""
        return len(self.latents) + self.pixel_bytes


@dataclass
class WaitingGroups:
    """The groups of one replica that wait. None overtakes another: a large one would wait for ever."""

    limit_s: float
    """How long a group may wait."""
    _groups: deque[WaitingGroup] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: WaitingGroup) -> None:
        """Let a group wait behind the others; groups come in the order of their arrival."""
        self._groups.append(group)

    def first_of(self, room_bytes: int) -> WaitingGroup | None:
        """Return the first group if it fits into so much memory; `take` removes it."""
        return self._groups[0] if self._groups and self._groups[0].needed_bytes <= room_bytes else None

    def take(self) -> WaitingGroup:
        """Remove the first group, which waits no more, and return it."""
        return self._groups.popleft()

    def expire(self, now: float) -> list[WaitingGroup]:
        """Remove the groups that have waited too long at `now`, and return them."""
        expired = []
        while self._groups and self._groups[0].arrived_at + self.limit_s <= now:
            expired.append(self._groups.popleft())
        return expired

    def next_deadline(self) -> float | None:
        """When `expire` must be called at the latest; None if no group waits."""
        return self._groups[0].arrived_at + self.limit_s if self._groups else None

    def cancel(self, leases: tuple[str, ...]) -> None:
        """Drop the groups of these leases."""
        self._groups = deque(group for group in self._groups if group.message.lease not in leases)
