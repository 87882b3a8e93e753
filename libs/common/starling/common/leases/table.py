"""Leases of a replica: bookkeeping that makes at-least-once delivery idempotent. Pure.

A lease is queued when its command arrives, working when its work begins, and answered when its result is known. The
result is kept, and resent periodically, until the controller releases the lease. A command that arrives twice is
therefore executed once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from starling.common.wire.messages import HeldLease, LeaseProgress, Up

Phase = Literal["queued", "working", "answered"]


@dataclass(slots=True)
class _Entry:
    phase: Phase = "queued"
    answer: Up | None = None
    buffers: tuple[bytes, ...] = ()
    sent_at: float = 0.0
    progress: LeaseProgress | None = None


@dataclass
class LeaseTable:
    """The leases of one replica."""

    resend_s: float
    """An answer that is not released within this time is resent."""
    _entries: dict[str, _Entry] = field(default_factory=dict)

    def grant(self, lease: str) -> bool:
        """Add the lease of a command. Returns False if it is already held: the command is a duplicate."""
        if lease in self._entries:
            return False
        self._entries[lease] = _Entry()
        return True

    def work(self, lease: str) -> bool:
        """Mark a lease as being worked on. Returns False if it has been released meanwhile."""
        entry = self._entries.get(lease)
        if entry is None:
            return False
        entry.phase = "working"
        return True

    def advance(self, lease: str, progress: LeaseProgress) -> None:
        """Set the progress of the work on a lease; an answered or released lease has none."""
        entry = self._entries.get(lease)
        if entry is not None and entry.phase == "working":
            entry.progress = progress

    def answer(self, lease: str, message: Up, buffers: tuple[bytes, ...], now: float) -> bool:
        """Keep a result until its lease is released. Returns False if that has happened already."""
        entry = self._entries.get(lease)
        if entry is None:
            return False
        entry.phase, entry.answer, entry.buffers, entry.sent_at = "answered", message, buffers, now
        entry.progress = None
        return True

    def release(self, leases: tuple[str, ...]) -> list[str]:
        """Forget leases. Returns those that were not answered, so that their work can be cancelled."""
        dropped = [(lease, self._entries.pop(lease)) for lease in leases if lease in self._entries]
        return [lease for lease, entry in dropped if entry.phase != "answered"]

    def due(self, now: float) -> list[tuple[Up, tuple[bytes, ...]]]:
        """Return the answers that must be resent now."""
        answers = []
        for entry in self._entries.values():
            if entry.answer is not None and now - entry.sent_at >= self.resend_s:
                entry.sent_at = now
                answers.append((entry.answer, entry.buffers))
        return answers

    def resend(self, lease: str) -> None:
        """Make the answer of `lease`, if there is one, due at once: its command arrived again."""
        entry = self._entries.get(lease)
        if entry is not None:
            entry.sent_at = float("-inf")

    def held(self) -> tuple[HeldLease, ...]:
        """Return every lease with its phase and progress, for the heartbeat."""
        return tuple(
            HeldLease(lease=lease, phase=entry.phase, progress=entry.progress) for lease, entry in self._entries.items()
        )
