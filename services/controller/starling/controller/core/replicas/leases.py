"""Leases: the work that each replica has, with its command, so that a lost command can be sent again."""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from starling.common.ids import LEASE_KINDS, LeaseKind
from starling.controller.core.events import Send

MAX_DROPPED = 10_000
"""Leases that ended without an answer and may still be reclaimed."""


class Lease(msgspec.Struct, gc=False):
    """One piece of work in force."""

    id: str
    kind: LeaseKind
    peer: str
    send: Send | None
    """None for work that was reclaimed: its holder has the command."""
    sent_at: float
    """When its command was sent last, or when it was reclaimed."""
    deadline: float
    begun_at: float
    """When its holder was given the work, also if it has lost the lease since, and reclaimed it."""
    tokens: int = 0
    """Tokens expected of a group to generate."""

    @property
    def held_from(self) -> float:
        """When it was put in force, the last time."""
        return self.sent_at if self.send is None else self.begun_at


class Dropped(NamedTuple):
    """A lease that ended without an answer and may still be reclaimed."""

    peer: str
    begun_at: float
    left_s: float
    """Seconds that were left until its deadline."""


class PeerLeases(msgspec.Struct, gc=False):
    """The leases of one replica that has, or had, any."""

    leases: dict[str, Lease] = {}
    """By id, the oldest first."""
    num: defaultdict[str, int] = msgspec.field(default_factory=lambda: defaultdict(int))
    """By kind."""
    tokens: int = 0
    """Tokens expected of all groups that it generates."""


NO_LEASES: Final = PeerLeases()


@dataclass
class Leases:
    """All leases in force. Free slots are derived from them and never counted separately."""

    num_granted: int = 0
    """Leases granted by this incarnation of the controller."""
    _leases: dict[str, Lease] = field(default_factory=dict)
    _by_peer: dict[str, PeerLeases] = field(default_factory=dict)
    _by_kind: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LEASE_KINDS, 0))
    _deadlines: list[tuple[float, str]] = field(default_factory=list)
    _dropped: dict[str, Dropped] = field(default_factory=dict)
    """The last leases that ended with the membership of their peer, or were taken from it."""

    def grant(
        self,
        lease: str,
        kind: LeaseKind,
        peer: str,
        send: Send | None,
        now: float,
        timeout_s: float,
        tokens: int = 0,
    ) -> None:
        """Put a lease in force."""
        self._add(Lease(lease, kind, peer, send, now, now + timeout_s, now, tokens))

    def restore(self, lease: str, kind: LeaseKind, peer: str, now: float, timeout_s: float, tokens: int = 0) -> None:
        """Put a lease in force that `peer` reports. If it had the lease before, this goes on: the time in which the
        lease was in force counts towards its deadline, and the time between does not."""
        begun_at = now
        if self.was_dropped(lease, peer):
            _, begun_at, timeout_s = self._dropped.pop(lease)
        self._add(Lease(lease, kind, peer, None, now, now + timeout_s, begun_at, tokens))

    def get(self, lease: str) -> Lease | None:
        """Return a lease in force."""
        return self._leases.get(lease)

    def settle(self, lease: str, peer: str) -> bool:
        """End a lease by its result. Returns False when `peer` does not hold it: the result comes too late."""
        found = self._leases.get(lease)
        if found is None or found.peer != peer:
            return False
        self.end(found)
        return True

    def drop(self, peer: str, now: float, *kinds: str) -> list[str]:
        """End the leases of these kinds that `peer` has, or all its leases because it is gone. Returns their ids."""
        dropped = sorted(self.of(peer, *kinds) if kinds else self.held_by(peer).leases)
        for lease in dropped:
            held = self._leases[lease]
            self.end(held)
            self._dropped[lease] = Dropped(peer, held.begun_at, held.deadline - now)
        if not kinds:
            self._by_peer.pop(peer, None)
        while len(self._dropped) > MAX_DROPPED:
            del self._dropped[next(iter(self._dropped))]
        return dropped

    def was_dropped(self, lease: str, peer: str) -> bool:
        """Say whether `peer` had this lease, and lost it without an answer."""
        dropped = self._dropped.get(lease)
        return dropped is not None and dropped.peer == peer

    def of(self, peer: str, *kinds: str) -> list[str]:
        """Return the ids of the leases of these kinds that `peer` has."""
        return [lease.id for lease in self.held_by(peer).leases.values() if lease.kind in kinds]

    def all_of(self, peer: str) -> list[Lease]:
        """Return all leases that `peer` has, the oldest first."""
        return list(self.held_by(peer).leases.values())

    def held_by(self, peer: str) -> PeerLeases:
        """Return the leases that `peer` has."""
        return self._by_peer.get(peer, NO_LEASES)

    def num(self, peer: str, kind: str) -> int:
        """Return how many leases of this kind `peer` has."""
        held = self._by_peer.get(peer)
        return 0 if held is None else held.num.get(kind, 0)

    def has(self, kind: LeaseKind) -> bool:
        """Say whether any replica has a lease of this kind."""
        return self._by_kind[kind] > 0

    def reconcile(
        self, peer: str, theirs: set[str], now: float, grace_s: float
    ) -> tuple[list[str], list[Send], list[Lease]]:
        """Compare with the leases that `peer` reports, `theirs`.

        Returns the leases that it reports and should not have; the commands, sent more than `grace_s` ago, that it
        never received; and the leases that it has reclaimed and lost, which are ended. A command is sent again when its
        lease is twice as old as it was the last time: all that a replica does not read take memory.
        """
        ours = self.held_by(peer).leases
        if ours.keys() == theirs:
            return [], [], []
        resend, lost = list[Send](), list[Lease]()
        for lease in sorted(ours.keys() - theirs):
            entry = ours[lease]
            if entry.send is None:
                lost.append(entry)
            elif grace_s <= now - entry.sent_at >= entry.sent_at - entry.begun_at:
                entry.sent_at = now
                resend.append(entry.send)
        for entry in lost:
            self.end(entry)
        return sorted(theirs - ours.keys()), resend, lost

    def expired(self, now: float) -> list[Lease]:
        """Return the leases whose deadline has passed."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now:
            entry = heapq.heappop(self._deadlines)
            lease = self._leases.get(entry[1])
            if lease is not None and lease.deadline == entry[0]:  # else it ended, or was put in force anew
                late.append(lease)
        return late

    def end(self, lease: Lease) -> None:
        """End a lease that is in force."""
        del self._leases[lease.id]
        held = self._by_peer[lease.peer]
        del held.leases[lease.id]
        held.num[lease.kind] -= 1
        held.tokens -= lease.tokens
        self._by_kind[lease.kind] -= 1
        # Entries of `_deadlines` outlive their leases; they are removed once most of them are stale.
        if len(self._deadlines) > 64 + 4 * len(self._leases):
            leases = self._leases
            self._deadlines = [
                entry
                for entry in self._deadlines
                if (present := leases.get(entry[1])) is not None and present.deadline == entry[0]
            ]
            heapq.heapify(self._deadlines)

    def _add(self, lease: Lease) -> None:
        held = self._by_peer.get(lease.peer)
        if held is None:
            held = self._by_peer[lease.peer] = PeerLeases()
        held.leases[lease.id] = self._leases[lease.id] = lease
        held.num[lease.kind] += 1
        held.tokens += lease.tokens
        self._by_kind[lease.kind] += 1
        heapq.heappush(self._deadlines, (lease.deadline, lease.id))
