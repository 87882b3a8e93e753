"""Work that replicas have in hand: each lease with its command, so that a lost command can be sent again."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from starling.common.ids import LeaseKind
from starling.controller.core.events import Send


@dataclass(slots=True)
class Lease:
    """One command in force."""

    id: str
    kind: LeaseKind
    peer: str
    send: Send | None
    """None for work that an earlier incarnation of the controller gave out: who holds it has the command."""
    sent_at: float
    deadline: float
    begun_at: float
    tokens: int = 0
    """Expected of it, where it is a group to generate."""


@dataclass
class Leases:
    """All commands in force. Capacity is derived from them; nothing is counted on the side."""

    _leases: dict[str, Lease] = field(default_factory=dict)
    _by_peer: dict[str, dict[str, Lease]] = field(default_factory=dict)
    _by_kind: Counter[str] = field(default_factory=Counter)
    _by_peer_and_kind: Counter[tuple[str, str]] = field(default_factory=Counter)
    _tokens: Counter[str] = field(default_factory=Counter)
    """Of all groups that a rollout has in hand."""
    _deadlines: list[tuple[float, str]] = field(default_factory=list)

    def grant(
        self,
        lease: str,
        kind: LeaseKind,
        peer: str,
        send: Send | None,
        now: float,
        patience_s: float,
        tokens: int = 0,
    ) -> None:
        """Put a command in force."""
        entry = Lease(lease, kind, peer, send, now, now + patience_s, now, tokens)
        if tokens:
            self._tokens[peer] += tokens
        self._leases[lease] = entry
        self._by_peer.setdefault(peer, {})[lease] = entry
        self._by_kind[kind] += 1
        self._by_peer_and_kind[peer, kind] += 1
        heapq.heappush(self._deadlines, (entry.deadline, lease))

    def get(self, lease: str) -> Lease | None:
        """Return a lease in force."""
        return self._leases.get(lease)

    def settle(self, lease: str, peer: str) -> bool:
        """End a lease by its result. Returns False when `peer` does not hold it: the result comes too late."""
        found = self._leases.get(lease)
        if found is None or found.peer != peer:
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
        if not any(self._by_peer_and_kind[peer, kind] for kind in kinds):
            return []
        return [lease for lease in self._by_peer.get(peer, ()) if lease.partition(":")[0] in kinds]

    def all_of(self, peer: str) -> list[Lease]:
        """Return everything that `peer` has in hand, the oldest first."""
        return list(self._by_peer.get(peer, {}).values())

    def num(self, peer: str, kind: str) -> int:
        """Return how much work of this kind `peer` has in hand."""
        return self._by_peer_and_kind[peer, kind]

    def num_tokens(self, peer: str) -> int:
        """Return how many tokens are expected of the groups that `peer` has in hand."""
        return self._tokens[peer]

    def has(self, kind: str) -> bool:
        """Say whether anybody has work of this kind in hand."""
        return self._by_kind[kind] > 0

    def compare(
        self, peer: str, held: Iterable[str], now: float, grace_s: float
    ) -> tuple[list[str], list[Send], list[str]]:
        """Compare with what `peer` says it holds.

        Returns the leases that it holds and should not; the commands, sent more than `grace_s` ago, that it never got;
        and the leases that it held when this controller began, and lost, which are no more.
        """
        ours = self._by_peer.get(peer, {})
        holds = set(held)
        if len(holds) == len(ours) and ours.keys() == holds:
            return [], [], []
        again, gone = [], []
        for lease in sorted(ours.keys() - holds):
            entry = ours[lease]
            if entry.send is None:
                gone.append(lease)
            elif now - entry.sent_at >= grace_s:
                entry.sent_at = now
                again.append(entry.send)
        for lease in gone:
            self._remove(self._leases[lease])
        return sorted(holds - ours.keys()), again, gone

    def overdue(self, now: float) -> list[Lease]:
        """Return the leases whose deadline has passed."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, lease = heapq.heappop(self._deadlines)
            if lease in self._leases:
                late.append(self._leases[lease])
        return late

    def _remove(self, lease: Lease) -> None:
        del self._leases[lease.id]
        mine = self._by_peer[lease.peer]
        del mine[lease.id]
        if lease.tokens:
            self._tokens[lease.peer] -= lease.tokens
        if not mine:
            del self._by_peer[lease.peer]
            self._tokens.pop(lease.peer, None)
        self._by_kind[lease.kind] -= 1
        left = self._by_peer_and_kind[lease.peer, lease.kind] - 1
        if left:
            self._by_peer_and_kind[lease.peer, lease.kind] = left
        else:
            del self._by_peer_and_kind[lease.peer, lease.kind]
        # An entry of `_deadlines` outlives its lease; when most are such, they go.
        if len(self._deadlines) > 64 + 4 * len(self._leases):
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._leases]
            heapq.heapify(self._deadlines)
