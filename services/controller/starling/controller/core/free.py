"""Who has a free slot: replicas by the version that they hold, the least busy one first.

Finding one takes the logarithm of their number, whatever that is. Entries are not removed when they become wrong: each
carries a stamp, and one whose stamp is not its member's counts no more. When most are such, they go.
"""

from __future__ import annotations

import heapq

from starling.controller.core.membership import Member

Entry = tuple[float, str, int, Member]


class Free:
    """Replicas of one role with a free slot."""

    def __init__(self) -> None:
        self._heaps: dict[int, list[Entry]] = {}
        self._stamps: dict[str, int] = {}
        self._num_stamps = 0
        self._num_entries = 0

    def put(self, member: Member, busy: int, slots: int | None = None) -> None:
        """Note that `member` holds what its `version` says, and works on `busy` groups of so many `slots` now."""
        slots = member.num_slots if slots is None else slots
        self._num_stamps += 1
        self._stamps[member.name] = self._num_stamps
        if busy < slots:
            heap = self._heaps.get(member.version)
            if heap is None:
                heap = self._heaps[member.version] = []
            heapq.heappush(heap, (busy / slots, member.name, self._num_stamps, member))
            self._num_entries += 1
            if self._num_entries > 64 + 4 * len(self._stamps):
                self._clean()

    def drop(self, member: Member) -> None:
        """Forget a member."""
        self._stamps.pop(member.name, None)

    def least_busy(self, min_version: int = -1) -> Member | None:
        """Return the member with the largest free share that holds at least `min_version`; names break ties."""
        best: Entry | None = None
        for version in [version for version in self._heaps if version >= min_version]:
            heap = self._heaps[version]
            while heap and heap[0][2] != self._stamps.get(heap[0][1]):
                heapq.heappop(heap)
                self._num_entries -= 1
            if not heap:
                del self._heaps[version]
            elif best is None or heap[0][:2] < best[:2]:
                best = heap[0]
        return None if best is None else best[3]

    def _clean(self) -> None:
        """Remove the entries that count no more: those of old versions, where nobody looks, among them."""
        heaps = self._heaps
        self._heaps, self._num_entries = {}, 0
        for version, heap in heaps.items():
            kept = [entry for entry in heap if entry[2] == self._stamps.get(entry[1])]
            if kept:
                heapq.heapify(kept)
                self._heaps[version] = kept
                self._num_entries += len(kept)
