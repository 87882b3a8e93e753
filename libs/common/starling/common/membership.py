"""How long a replica may take itself for a member, by its own clock: what shared devices are fenced with.

    controller:   heard ──── lease_s ────> lost ──── (n * lease_s) ────> others may have its devices
    replica:    said ──── lease_s ────> asleep by itself ── ((n - 1 1/4) * lease_s) ──> its process is ended

The controller's clock begins when it hears a replica; the replica's began before, when it *said* what was answered
last. So whoever is lost knows of it no later than the controller, however long the answer was on its way, by clocks
that need only run equally fast.
"""

from __future__ import annotations

from typing import Final

from starling.common.ids import Role, lease_kind
from starling.common.leases import LeaseTable
from starling.common.wire.messages import Welcome

DEVICE_GRACE_LEASES: Final[dict[Role, int]] = {"rollout": 2, "policy": 30}
"""For so many leases the devices of a replica that was lost awake are left to it. A rollout can break off what it does.
A step cannot be broken off, and to make it again costs more than to wait."""
MARGIN: Final = 0.25
"""Leases within which a process that ends has given its devices back."""
MAX_UNANSWERED: Final = 64
MAX_SEQ: Final = 1 << 63
"""Number of what was not said by this replica: an answer to nothing in particular."""


class MembershipLease:
    """What one replica knows of its membership."""

    def __init__(self, sender: str) -> None:
        """`sender`: what the ids of its messages begin with, ``<name>/<incarnation>/``."""
        self._sender = sender
        self._said: dict[int, float] = {}
        """When it said each message that the controller answers and has not answered yet, by their numbers."""
        self._lease_s = 0.0
        self._until = float("-inf")
        self.shares_devices = False
        """Whether the controller has said that others have its devices by turns."""

    def says(self, seq: int, now: float) -> None:
        """It says message number `seq`, a hello or a heartbeat."""
        self._said[seq] = now
        if len(self._said) > MAX_UNANSWERED:
            del self._said[next(iter(self._said))]

    def answered(self, cause: str, welcome: Welcome, book: LeaseTable, now: float) -> int:
        """The controller answers what `cause` names: this replica is a member for a while. Returns its number.

        Had it lost the controller before, it may have become the turn of others since, and it may have fallen asleep.
        So an order to wake that came before this, and is not being carried out, is dropped from `book`, also if it was
        answered: it is not awake by that order any more. If it is still meant it is said again.
        """
        if not self.holds(now):
            idle = (held.lease for held in book.held() if held.phase != "working")
            book.release(tuple(lease for lease in idle if lease_kind(lease) == "wake"))
        self._lease_s, self.shares_devices = welcome.lease_s, welcome.shares_devices
        if self._until == float("-inf"):
            # What it loaded at its start is nothing that anybody waits for, however long its first words lay unread.
            self._until = now
        text = cause.removeprefix(self._sender)
        if not text.isdecimal():
            return MAX_SEQ
        number = int(text)
        said_at = self._said.get(number)
        if said_at is not None:
            self._until = max(self._until, said_at + self._lease_s)
            self._said = {seq: at for seq, at in self._said.items() if seq > number}
        return number

    def holds(self, now: float) -> bool:
        """Say whether it may have devices that it shares; those that it does not share it has for good."""
        return not self.shares_devices or now <= self._until

    def forbids(self, lease: str, now: float) -> bool:
        """Say whether `lease` is an order to wake, of which it cannot know whether it is still meant."""
        return lease_kind(lease) == "wake" and not self.holds(now)

    def is_over(self, role: Role, now: float) -> bool:
        """Say whether a replica of `role` that still has its devices must end, so as to have none."""
        return self.shares_devices and now > self._until + (DEVICE_GRACE_LEASES[role] - 1 - MARGIN) * self._lease_s
