"""Stop 2 of the walk, decided: the rollout that will finish a group first.

A rollout with `queued` tokens in hand that makes `speed` tokens a second finishes a group of `tokens` after
``(queued + tokens) / speed`` seconds. Among those of one version and one speed that is the one with the least in hand,
so each such pair has a heap, and a decision looks at the top of each: their number does not grow with the fleet (speeds
come in classes, see `expect.py`; versions in use are few). Entries go stale in place, as in `free.py`.

Slots bound what a rollout works on at a time. A slow one with a free slot may still be the wrong place for the last
groups of a step: when those that are full would be done with all that waits before the slow one is with this group,
the group waits for them. While much waits that is never so, and everybody is busy.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from starling.controller.core.replicas.membership import Member

Place = tuple[int, float]
"""Version, and tokens a second."""
Entry = tuple[int, str, int, Member]
"""Tokens in hand, name, stamp."""
NOWHERE: Final = (0, (0, 0.0), 0)


@dataclass(slots=True)
class Full:
    """Those of one place that have no free slot, together."""

    num: int = 0
    queued: int = 0


class Route(NamedTuple):
    """The rollout that will finish a group first, and in how many seconds."""

    member: Member
    seconds: float


@dataclass
class Routing:
    """Rollouts by version and speed: those with a free slot in heaps, the others as sums."""

    _heaps: dict[Place, list[Entry]] = field(default_factory=dict)
    _full: dict[Place, Full] = field(default_factory=dict)
    _where: dict[str, tuple[int, Place, int]] = field(default_factory=dict)
    """By name: the stamp of its entry that counts, or -1 for who is full; its place; its tokens in hand."""
    _num_stamps: int = 0
    _num_entries: int = 0

    def put(self, member: Member, busy: int, slots: int, *, queued: int, speed: float) -> None:
        """Note what `member` has in hand: `busy` groups in its `slots`, of `queued` tokens; `speed` is of all slots."""
        name, place = member.name, (member.version, speed)
        before = self._where.get(name)
        if before is not None and before[0] < 0:
            self.drop(member)
        if busy >= slots:
            full = self._full.setdefault(place, Full())
            full.num, full.queued = full.num + 1, full.queued + queued
            self._where[name] = -1, place, queued
            return
        self._num_stamps += 1
        self._where[name] = self._num_stamps, place, queued
        heap = self._heaps.get(place)
        if heap is None:
            heap = self._heaps[place] = []
        heapq.heappush(heap, (queued, name, self._num_stamps, member))
        self._num_entries += 1
        if self._num_entries > 64 + 4 * len(self._where):
            self._clean()

    def drop(self, member: Member) -> None:
        """Forget a member."""
        stamp, place, queued = self._where.pop(member.name, NOWHERE)
        if stamp < 0:
            full = self._full[place]
            full.num, full.queued = full.num - 1, full.queued - queued
            if not full.num:
                del self._full[place]

    def soonest(self, min_version: int, tokens: int) -> Route | None:
        """Return who of those with a free slot and at least `min_version` finishes first; names break ties."""
        best: tuple[float, str] | None = None
        found: Member | None = None
        empty, where = [], self._where
        for place, heap in self._heaps.items():
            if place[0] < min_version:
                continue
            while heap and where.get(heap[0][1], NOWHERE)[0] != heap[0][2]:
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

    def should_wait(self, found: Route, min_version: int, tokens: int, waiting: int) -> bool:
        """Say whether a group of `tokens` had better wait for somebody who is full now.

        `waiting`: tokens of all groups that wait, this one among them, which those who are full would do before.
        """
        queued, speed, fastest = waiting, 0.0, 0.0
        for place, full in self._full.items():
            if place[0] >= min_version:
                queued, speed, fastest = queued + full.queued, speed + full.num * place[1], max(fastest, place[1])
        return speed > 0 and found.seconds > queued / speed + tokens / fastest

    def _clean(self) -> None:
        """Remove the entries that count no more: those of old versions, where nobody looks, among them."""
        kept = {
            place: [entry for entry in heap if self._where.get(entry[1], NOWHERE)[0] == entry[2]]
            for place, heap in self._heaps.items()
        }
        self._heaps = {place: heap for place, heap in kept.items() if heap}
        for heap in self._heaps.values():
            heapq.heapify(heap)
        self._num_entries = sum(map(len, self._heaps.values()))
