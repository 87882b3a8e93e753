"""Routing: the rollout that will finish a group first (stop 2 of the walk).

A rollout with `queued` tokens in its slots and a speed of `speed` tokens per second finishes a group of `tokens` after
``(queued + tokens) / speed`` seconds. Among rollouts of one version and one speed this is the one with the fewest
queued tokens. So each such pair has a heap, and a decision looks at the top of each: the number of heaps does not grow
with the fleet (speeds come in classes, see `estimates.py`; few versions are in use). Entries go stale in place, as in
`slots.py`.

Slots bound the concurrency of a rollout. A slow rollout with a free slot may still be the wrong place for the last
groups of a step: when the rollouts without a free slot would finish all waiting groups before the slow one finishes
this group, the group waits for them. While many groups wait this is never so, and every rollout is busy.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from starling.controller.core.replicas.membership import Member

SpeedClass = tuple[int, float]
"""Version, and tokens per second."""
QueueEntry = tuple[int, str, int, Member]
"""Queued tokens, name, stamp, and the member itself."""
UNKNOWN: Final = (0, (0, 0.0), 0)


@dataclass(slots=True)
class FullRollouts:
    """The rollouts of one class that have no free slot, together."""

    num: int = 0
    queued: int = 0


class Route(NamedTuple):
    """The rollout that will finish a group first, and in how many seconds."""

    member: Member
    seconds: float


@dataclass
class Routing:
    """Rollouts by version and speed: those with a free slot in heaps, the others as sums."""

    _heaps: dict[SpeedClass, list[QueueEntry]] = field(default_factory=dict)
    _full: dict[SpeedClass, FullRollouts] = field(default_factory=dict)
    _known: dict[str, tuple[int, SpeedClass, int]] = field(default_factory=dict)
    """By name: the stamp of its valid entry, or -1 without a free slot; its class; its queued tokens."""
    _num_stamps: int = 0
    _num_entries: int = 0

    def put(self, member: Member, busy: int, slots: int, *, queued: int, speed: float) -> None:
        """Note that `member` works on `busy` groups in `slots`, of `queued` tokens; `speed` is that of all slots."""
        name, place = member.name, (member.version, speed)
        before = self._known.get(name)
        if before is not None and before[0] < 0:
            self.drop(member)
        if busy >= slots:
            full = self._full.setdefault(place, FullRollouts())
            full.num, full.queued = full.num + 1, full.queued + queued
            self._known[name] = -1, place, queued
            return
        self._num_stamps += 1
        self._known[name] = self._num_stamps, place, queued
        heap = self._heaps.get(place)
        if heap is None:
            heap = self._heaps[place] = []
        heapq.heappush(heap, (queued, name, self._num_stamps, member))
        self._num_entries += 1
        if self._num_entries > 64 + 4 * len(self._known):
            self._remove_stale()

    def drop(self, member: Member) -> None:
        """Forget a member."""
        stamp, place, queued = self._known.pop(member.name, UNKNOWN)
        if stamp < 0:
            full = self._full[place]
            full.num, full.queued = full.num - 1, full.queued - queued
            if not full.num:
                del self._full[place]

    def soonest(self, min_version: int, tokens: int) -> Route | None:
        """Return the rollout with a free slot and at least `min_version` that finishes first; names break ties."""
        best: tuple[float, str] | None = None
        found: Member | None = None
        empty, known = [], self._known
        for place, heap in self._heaps.items():
            if place[0] < min_version:
                continue
            while heap and known.get(heap[0][1], UNKNOWN)[0] != heap[0][2]:
                heapq.heappop(heap)
                self._num_entries -= 1
            if not heap:
                empty.append(place)
                continue
            candidate = (heap[0][0] + tokens) / place[1], heap[0][1]
            if best is None or candidate < best:
                best, found = candidate, heap[0][3]
        for place in empty:
            del self._heaps[place]
        return None if best is None or found is None else Route(found, best[0])

    def soonest_but(self, name: str, min_version: int, tokens: int) -> Route | None:
        """Return the one of `soonest` among all rollouts but `name`; this looks at all of them."""
        routes = [
            ((queued + tokens) / speed, other, member)
            for (version, speed), heap in self._heaps.items()
            if version >= min_version
            for queued, other, stamp, member in heap
            if other != name and self._known.get(other, UNKNOWN)[0] == stamp
        ]
        seconds, _, member = min(routes, key=lambda route: route[:2], default=(0.0, "", None))
        return None if member is None else Route(member, seconds)

    def should_wait(self, route: Route, min_version: int, tokens: int, waiting: int) -> bool:
        """Say whether a group of `tokens` finishes earlier if it waits for a rollout that has no free slot now.

        `waiting`: tokens of all groups that wait, this one among them, which those rollouts would do before.
        """
        queued, speed, fastest = waiting, 0.0, 0.0
        for place, full in self._full.items():
            if place[0] >= min_version:
                queued, speed, fastest = queued + full.queued, speed + full.num * place[1], max(fastest, place[1])
        return speed > 0 and route.seconds > queued / speed + tokens / fastest

    def _remove_stale(self) -> None:
        """Remove stale entries, also those of old versions, which `soonest` never looks at."""
        kept = {
            place: [entry for entry in heap if self._known.get(entry[1], UNKNOWN)[0] == entry[2]]
            for place, heap in self._heaps.items()
        }
        self._heaps = {place: heap for place, heap in kept.items() if heap}
        for heap in self._heaps.values():
            heapq.heapify(heap)
        self._num_entries = sum(map(len, self._heaps.values()))
