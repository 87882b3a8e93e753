"""Membership lease: how long a replica may use devices that it shares, by its own clock.

    controller:   received ── lease_s ──> lost ──── (n * lease_s) ────> others may have its devices
    replica:    sent ──── lease_s ────> asleep by itself ── ((n - 1 1/4) * lease_s) ──> its process exits

The controller's clock starts when it receives a message; the replica's started before, when it *sent* the message that
was answered last. So a lost replica knows it no later than the controller, however long the answer was delayed, with
clocks that need only run at the same rate.
"""

from __future__ import annotations

from typing import Final

from starling.common.ids import Role, lease_kind
from starling.common.leases.table import LeaseTable
from starling.common.wire.messages import Welcome

DEVICE_GRACE_LEASES: Final[dict[Role, int]] = {"rollout": 2, "policy": 30}
"""Lease periods for which a replica that was lost awake keeps its devices. A rollout can interrupt its work. A step
cannot be interrupted, and repeating it costs more than waiting."""
MARGIN: Final = 0.25
"""Lease periods within which an exiting process has released its devices."""
MAX_UNANSWERED: Final = 64
MAX_SEQ: Final = 1 << 63
"""Sequence number that no message of this replica has: of an answer that names none."""


class MembershipLease:
    """Membership of one replica, as it knows from the controller's answers."""

    def __init__(self, sender: str) -> None:
        """`sender`: prefix of its message ids, ``<name>/<incarnation>/``."""
        self._sender = sender
        self._sent: dict[int, float] = {}
        """When each message that the controller answers, and has not answered yet, was sent; by sequence number."""
        self._lease_s = 0.0
        self._until = float("-inf")
        self.shares_devices = False
        """Whether, by the controller's last welcome, other replicas use its devices in turn with it."""

    def sent(self, seq: int, now: float) -> None:
        """Record that message number `seq`, a hello or a heartbeat, is sent."""
        self._sent[seq] = now
        if len(self._sent) > MAX_UNANSWERED:
            del self._sent[next(iter(self._sent))]

    def welcomed(self, cause: str, welcome: Welcome, leases: LeaseTable, now: float) -> int:
        """Extend the lease by the controller's answer to the message `cause`. Returns its sequence number.

        If the lease had expired, other replicas may have used the devices since, and this one may have fallen asleep.
        So a command to wake that came before this, and is not being carried out, is dropped from `leases`, even if it
        was answered: it no longer holds. If the controller still means it, it sends it again.
        """
        if not self.is_valid(now):
            idle = (held.lease for held in leases.held() if held.phase != "working")
            leases.release(tuple(lease for lease in idle if lease_kind(lease) == "wake"))
        self._lease_s, self.shares_devices = welcome.lease_s, welcome.shares_devices
        if self._until == float("-inf"):
            # No other replica waits for the devices that it loaded at its start, however late its first hello was read.
            self._until = now
        text = cause.removeprefix(self._sender)
        if not text.isdecimal():
            return MAX_SEQ
        number = int(text)
        sent_at = self._sent.get(number)
        if sent_at is not None:
            self._until = max(self._until, sent_at + self._lease_s)
            self._sent = {seq: at for seq, at in self._sent.items() if seq > number}
        return number

    def is_valid(self, now: float) -> bool:
        """Whether it may have devices that it shares; it always keeps those that it does not share."""
        return not self.shares_devices or now <= self._until

    def forbids(self, lease: str, now: float) -> bool:
        """Whether `lease` is a command to wake that may be out of date, because the membership lease has expired.

        Or that came before the first welcome, which was lost: without a lease, the replica would never sleep by itself.
        """
        was_welcomed = self._until > float("-inf")
        return not (was_welcomed and self.is_valid(now)) and lease_kind(lease) == "wake"

    def must_exit(self, role: Role, now: float) -> bool:
        """Whether a replica of `role` that still has its devices must exit, to release them."""
        return self.shares_devices and now > self._until + (DEVICE_GRACE_LEASES[role] - 1 - MARGIN) * self._lease_s
