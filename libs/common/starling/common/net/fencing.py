"""Lease fencing: keeps a replica that has lost the controller off shared devices; see `common.leases.membership`."""

from __future__ import annotations

import threading
import time

import structlog

from starling.common.ids import Role
from starling.common.leases.membership import DEVICE_GRACE_LEASES, MembershipLease
from starling.common.leases.table import LeaseTable
from starling.common.observe.process import EXIT_FAILED, end_process
from starling.common.wire.messages import Welcome

log = structlog.get_logger(__name__)


class LeaseFence:
    """The membership lease of the replica in this process, and its enforcement. Thread-safe."""

    def __init__(self, sender: str, role: Role) -> None:
        """`sender`: prefix of its message ids; see `MembershipLease`."""
        self._membership, self._role = MembershipLease(sender), role
        self._has_devices = True
        self._lock = threading.Lock()

    @property
    def may_keep_devices(self) -> bool:
        """Whether this replica may keep the devices that it has, as far as it knows."""
        with self._lock:
            return self._membership.is_valid(time.monotonic())

    @property
    def shares_devices(self) -> bool:
        """Whether, by the controller's last welcome, other replicas use its devices in turn with it."""
        with self._lock:
            return self._membership.shares_devices

    def keeps_devices(self, keeps: bool) -> None:
        """Record whether this replica has its devices, as it does at the start, or has released them."""
        with self._lock:
            self._has_devices = keeps

    def sent(self, seq: int, now: float) -> None:
        """Record that message number `seq`, a hello or a heartbeat, is sent, not before `now`."""
        with self._lock:
            self._membership.sent(seq, now)

    def welcomed(self, cause: str, welcome: Welcome, leases: LeaseTable) -> int:
        """Extend the lease by the controller's answer to the message `cause`; see `MembershipLease`."""
        with self._lock:
            return self._membership.welcomed(cause, welcome, leases, time.monotonic())

    def may_work(self, lease: str, leases: LeaseTable) -> bool:
        """Whether work on `lease` may begin. A command to wake that may be out of date is dropped from `leases`."""
        with self._lock:
            forbidden = self._membership.forbids(lease, time.monotonic())
        if forbidden:
            leases.release((lease,))
        return not forbidden

    def check(self, now: float) -> None:
        """End this process if it still has devices that others may get soon: the work under way cannot be stopped."""
        with self._lock:
            limited = self._has_devices and self._role in DEVICE_GRACE_LEASES
            must_exit = limited and self._membership.must_exit(self._role, now)
        if must_exit:
            log.error("ended_to_free_devices", reason="the controller does not answer, and others may have them soon")
            end_process(EXIT_FAILED)
