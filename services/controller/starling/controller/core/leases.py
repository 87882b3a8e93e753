"""Work that replicas have in hand: each lease with its command, so that a lost command can be sent again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from starling.common.ids import lease_kind
from starling.controller.core.events import Send


@dataclass
class Lease:
    """One command in force."""

    id: str
    send: Send
    sent_at: float


@dataclass
class Leases:
    """All commands in force. Capacity is derived from them; nothing is counted on the side."""

    _leases: dict[str, Lease] = field(default_factory=dict)
    _by_peer: dict[str, set[str]] = field(default_factory=dict)
    _by_kind: Counter[str | None] = field(default_factory=Counter)

    def grant(self, lease: str, send: Send, now: float) -> Send:
        """Put a command in force and return it for sending."""
        self._leases[lease] = Lease(lease, send, now)
        self._by_peer.setdefault(send.peer, set()).add(lease)
        self._by_kind[lease_kind(lease)] += 1
        return send

    def settle(self, lease: str, peer: str) -> bool:
        """End a lease by its result. Returns False when `peer` does not hold it: the result comes too late."""
        found = self._leases.get(lease)
        if found is None or found.send.peer != peer:
            return False
        self._remove(found)
        return True

    def drop(self, peer: str, *kinds: str) -> list[str]:
        """End the leases that `peer` has of these kinds, or all when none is named."""
        dropped = sorted(self.of(peer, *kinds) if kinds else self._by_peer.get(peer, ()))
        for lease in dropped:
            self._remove(self._leases[lease])
        return dropped

    def of(self, peer: str, *kinds: str) -> list[str]:
        """Return what `peer` has in hand, of these kinds."""
        return [lease for lease in self._by_peer.get(peer, ()) if lease_kind(lease) in kinds]

    def has(self, kind: str) -> bool:
        """Say whether anybody has work of this kind in hand."""
        return self._by_kind[kind] > 0

    def compare(self, peer: str, held: Iterable[str], now: float, grace_s: float) -> tuple[list[str], list[Send]]:
        """Compare with what `peer` says it holds.

        Returns the leases that it should forget, and the commands, sent more than `grace_s` ago, that it never got.
        """
        holds = set(held)
        ours = self._by_peer.get(peer, set())
        missing = [self._leases[lease] for lease in sorted(ours - holds)]
        lost = [lease for lease in missing if now - lease.sent_at >= grace_s]
        for lease in lost:
            lease.sent_at = now
        return sorted(holds - ours), [lease.send for lease in lost]

    def _remove(self, lease: Lease) -> None:
        del self._leases[lease.id]
        self._by_peer[lease.send.peer].discard(lease.id)
        self._by_kind[lease_kind(lease.id)] -= 1
