"""What keeps a replica that has lost the controller off devices that it shares; see `starling.common.membership`."""

from __future__ import annotations

import threading
import time

import structlog

from starling.common.ids import Role
from starling.common.leases import LeaseTable
from starling.common.membership import DEVICE_GRACE_LEASES, MembershipLease
from starling.common.observe.process import EXIT_FAILED, end_process
from starling.common.wire.messages import Welcome

log = structlog.get_logger(__name__)


class LeaseFence:
    """The standing of the replica in this process, and what follows from it. Any thread may ask."""

    def __init__(self, sender: str, role: Role) -> None:
        """`sender`: what the ids of its messages begin with; see `MembershipLease`."""
        self._standing, self._role = MembershipLease(sender), role
        self._has_devices = True
        self._lock = threading.Lock()

    @property
    def may_keep_devices(self) -> bool:
        """Whether this replica may have its devices, as far as it knows, if it has them."""
        with self._lock:
            return self._standing.holds(time.monotonic())

    @property
    def shares_devices(self) -> bool:
        """Whether others have the devices of this replica by turns, as far as the controller has said."""
        with self._lock:
            return self._standing.shares_devices

    def keeps_devices(self, keeps: bool) -> None:
        """Say whether this replica has its devices, as it does at the start, or has given them away."""
        with self._lock:
            self._has_devices = keeps

    def says(self, seq: int, now: float) -> None:
        """Message number `seq`, a hello or a heartbeat, is said, not before `now`."""
        with self._lock:
            self._standing.says(seq, now)

    def answered(self, cause: str, welcome: Welcome, book: LeaseTable) -> int:
        """The controller answers what `cause` names; see `MembershipLease`."""
        with self._lock:
            return self._standing.answered(cause, welcome, book, time.monotonic())

    def may_do(self, lease: str, book: LeaseTable) -> bool:
        """Say whether `lease` may be taken up. `book` forgets an order to wake that may not be meant any more."""
        with self._lock:
            forbidden = self._standing.forbids(lease, time.monotonic())
        if forbidden:
            book.release((lease,))
        return not forbidden

    def check(self, now: float) -> None:
        """End this process if it still has devices that others may have soon: whatever it does, it could not stop."""
        with self._lock:
            has_too_long = (
                self._has_devices and self._role in DEVICE_GRACE_LEASES and self._standing.is_over(self._role, now)
            )
        if has_too_long:
            log.error("ended_to_free_devices", reason="the controller does not answer, and others may have them soon")
            end_process(EXIT_FAILED)
