"""Who has a free slot: replicas by the version that they hold, the least busy one first.

Finding one takes the logarithm of their number, whatever that is. Entries are not removed when they become wrong: each
carries a stamp, and one whose stamp is not its member's counts no more. When most are such, they go.
"""

from __future__ import annotations

import heapq

from starling.common.ids import lease_subject
from starling.controller.core.evaluation.evaluation import Evaluation, slots_of
from starling.controller.core.replicas.estimates import RateEstimates
from starling.controller.core.replicas.leases import Leases
from starling.controller.core.replicas.membership import Member
from starling.controller.core.replicas.routing import Routing

Entry = tuple[float, str, int, Member]


class FreeSlots:
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


# JOINED from starling.controller.core.capacity: Who may be given more work: replicas with a free slot, by
# what they hold, have in hand, and are fast at.  All of it is derived from the leases in force. Most events
# change those of somebody, and few then ask who is free: who changed is noted, and looked at when somebody
# asks.


class SlotIndex:
    """The free slots of rollouts, rewards and teachers."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self.routing = Routing()
        """Rollouts, for groups to train."""
        self.rewards, self.teachers = FreeSlots(), FreeSlots()
        self.rates = RateEstimates()
        self.resting: dict[str, float] = {}
        """Rollouts that get no group for now, and until when."""
        self.changed: dict[str, Member] = {}
        """Whose work or version changed since `update` was called for it."""

    def update(self, member: Member, evaluation: Evaluation | None, num_rollouts: int) -> None:
        """Note how many slots `member` has free, after its work or its version changed."""
        if member.role == "reward":
            self.rewards.put(member, self._leases.num(member.name, "score"))
        elif member.role == "teacher":
            self.teachers.put(member, self._leases.num(member.name, "teach"))
        elif member.role == "rollout":
            if member.name in self.resting:
                self.drop(member, evaluation)
                return
            busy, queued = self._leases.num(member.name, "generate"), self._leases.num_tokens(member.name)
            speed = member.num_slots * self.rates.rate(member.name)
            self.routing.put(member, busy, member.num_slots, queued=queued, speed=speed)
            if evaluation is not None and member.name in evaluation.pinned:
                self._update_for(evaluation, member, busy, num_rollouts)

    def rested(self, now: float) -> list[str]:
        """Return whose rest is over, and let it be over."""
        names = [name for name, until in self.resting.items() if until <= now]
        for name in names:
            del self.resting[name]
        return names

    def forget(self, member: Member, evaluation: Evaluation | None) -> None:
        """`member` is gone; who comes back under that name may run on another machine."""
        self.drop(member, evaluation)
        self.rates.forget(member.name)
        self.resting.pop(member.name, None)

    def drop(self, member: Member, evaluation: Evaluation | None) -> None:
        """Give `member` nothing until it changes."""
        self.changed.pop(member.name, None)
        for free in (self.routing, self.rewards, self.teachers):
            free.drop(member)
        if evaluation is not None:
            evaluation.free.drop(member)

    def _update_for(self, evaluation: Evaluation, member: Member, busy: int, num_rollouts: int) -> None:
        if member.version != evaluation.version:
            evaluation.free.drop(member)
            return
        slots = slots_of(member, num_rollouts)
        held = self._leases.of(member.name, "generate")
        num = sum(lease_subject(lease).startswith("e") for lease in held) if busy < member.num_slots else slots
        queued, speed = self._leases.num_tokens(member.name), slots * self.rates.rate(member.name)
        evaluation.free.put(member, num, slots, queued=queued, speed=speed)
