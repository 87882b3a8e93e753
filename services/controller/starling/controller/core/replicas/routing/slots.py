"""Index of replicas with free slots: by held version, queue length and speed.

All of it is derived from the leases in force. Most events change the leases of some replica, and few events ask for a
free slot. So a replica whose leases changed is only marked, and the index is updated when a free slot is asked for.
"""

from __future__ import annotations

import heapq
from collections.abc import Container
from typing import Final, Protocol

from starling.common.ids import Role, lease_subject
from starling.controller.core.replicas.leases import Leases
from starling.controller.core.replicas.membership import REPLICA_ROLES, Member, Membership
from starling.controller.core.replicas.routing.earliest_finish import Routing
from starling.controller.core.replicas.routing.estimates import RateEstimates
from starling.controller.core.replicas.time_sharing import TimeSharing

Entry = tuple[float, str, int, Member]
LATE_EVERY_S: Final = 1.0
"""How often, at most, rollouts are looked for that are slower than they were."""
SLOT_KINDS: Final = frozenset({"generate", "score", "teach"})
"""The kinds of work that take a slot of a replica."""


class FreeSlots:
    """Replicas of one role with a free slot, by the version that they hold, the least busy first.

    To find one takes the logarithm of their number. Entries are not removed when they go stale: each carries a stamp,
    and an entry counts only while its stamp is its member's. Stale entries are removed once most of them are.
    """

    def __init__(self) -> None:
        self._heaps: dict[int, list[Entry]] = {}
        self._stamps: dict[str, int] = {}
        self._num_stamps = 0
        self._num_entries = 0

    def put(self, member: Member, busy: int, slots: int | None = None) -> None:
        """Note that `member` holds its `version`, and works on `busy` groups in `slots` slots."""
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
                self._remove_stale()

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

    def least_busy_but(self, name: str) -> Member | None:
        """Return the member with the largest free share that is not `name`; this looks at all of them."""
        entries = [
            entry
            for heap in self._heaps.values()
            for entry in heap
            if entry[1] != name and entry[2] == self._stamps.get(entry[1])
        ]
        return min(entries, key=lambda entry: entry[:2])[3] if entries else None

    def _remove_stale(self) -> None:
        """Remove stale entries, also those of old versions, which `least_busy` never looks at."""
        heaps = self._heaps
        self._heaps, self._num_entries = {}, 0
        for version, heap in heaps.items():
            kept = [entry for entry in heap if entry[2] == self._stamps.get(entry[1])]
            if kept:
                heapq.heapify(kept)
                self._heaps[version] = kept
                self._num_entries += len(kept)


class PinnedRollouts(Protocol):
    """Rollouts that an evaluation is pinned to."""

    version: int
    pinned: set[str]
    routing: Routing
    """Of the pinned rollouts, those that hold `version`."""


class SlotIndex:
    """The free slots of rollouts, rewards and teachers."""

    def __init__(
        self, leases: Leases, membership: Membership, sharing: TimeSharing, draining: Container[str] = ()
    ) -> None:
        """`draining`: replicas that get no more work."""
        self._leases, self._membership, self._sharing, self._draining = leases, membership, sharing, draining
        self.routing = Routing()
        """Rollouts, for groups to train."""
        self.rewards, self.teachers = FreeSlots(), FreeSlots()
        self.rates = RateEstimates()
        self.cooldowns: dict[str, float] = {}
        """Replicas in cooldown, and until when."""
        self._late_at = float("-inf")
        """When rollouts that are late are looked for again."""
        self._changed: dict[Role, dict[str, Member]] = {role: {} for role in REPLICA_ROLES}
        """By role: members whose leases or version changed since the last refresh of the role."""

    def mark(self, member: Member, kind: str = "") -> None:
        """Note that the free slots of `member` changed: by a lease of `kind`, or by another change."""
        if not kind or kind in SLOT_KINDS:
            self._changed[member.role][member.name] = member

    def refreshed(self, role: Role, evaluation: PinnedRollouts | None) -> SlotIndex:
        """Return this index after an update of all marked members of `role`."""
        changed = self._changed[role]
        if changed:
            self._changed[role] = {}
            num_rollouts = self._membership.num("rollout")
            for member in changed.values():
                is_asleep = self._sharing.shared and not self._sharing.has_devices(member)
                if is_asleep or member.name in self.cooldowns or member.name in self._draining:
                    self.drop(member, evaluation)
                elif member.has_reported:
                    self._update(member, evaluation, num_rollouts)
        return self

    def _update(self, member: Member, evaluation: PinnedRollouts | None, num_rollouts: int) -> None:
        if member.role == "reward":
            self.rewards.put(member, self._leases.num(member.name, "score"))
        elif member.role == "teacher":
            self.teachers.put(member, self._leases.num(member.name, "teach"))
        elif not member.is_follower:
            held = self._leases.held_by(member.name)
            busy, speed = held.num.get("generate", 0), member.num_slots * self.rates.rate(member.name)
            self.routing.put(member, busy, member.num_slots, queued=held.tokens, speed=speed)
            if evaluation is not None and member.name in evaluation.pinned:
                self._update_pinned(evaluation, member, busy, num_rollouts)

    def _update_pinned(self, evaluation: PinnedRollouts, member: Member, busy: int, num_rollouts: int) -> None:
        if member.version != evaluation.version:
            evaluation.routing.drop(member)
            return
        slots = evaluation_slots(member, num_rollouts)
        held = self._leases.of(member.name, "generate")
        num = sum(lease_subject(lease).startswith("e") for lease in held) if busy < member.num_slots else slots
        queued, speed = self._leases.held_by(member.name).tokens, slots * self.rates.rate(member.name)
        evaluation.routing.put(member, num, slots, queued=queued, speed=speed)

    def slow_down_late(self, now: float) -> bool:
        """Lower the speeds of rollouts that are slower with the groups that they have than they were before.

        Returns whether any was. Others wait for the fast ones to have a free slot, which one that stopped to answer
        never has.
        """
        if now < self._late_at:
            return False
        self._late_at = now + LATE_EVERY_S
        late = False
        for member in self._membership.of("rollout"):
            held = self._leases.held_by(member.name).leases.values()
            oldest = next((lease for lease in held if lease.kind == "generate" and lease.send is not None), None)
            if oldest and self.rates.note_unfinished(member.name, oldest.tokens, now - oldest.begun_at):
                self.mark(member)
                late = True
        return late

    def cool_down(self, member: Member, until: float) -> None:
        """Give a replica no group until then, at least: it is about to leave, has lost its engine, or is set aside."""
        self.cooldowns[member.name] = max(until, self.cooldowns.get(member.name, until))
        self.mark(member)

    def end_cooldowns(self, now: float) -> None:
        """End the cooldowns that are over."""
        for name in [name for name, until in self.cooldowns.items() if until <= now]:
            self.end_cooldown(name, now)

    def end_cooldown(self, name: str, now: float) -> None:
        """End the cooldown of a member, if it is in one; that of a member that is set aside lasts for as long."""
        if name not in self.cooldowns:
            return
        if self._membership.is_set_aside(name, now):
            self.cooldowns[name] = self._membership.set_aside[name]
        else:
            del self.cooldowns[name]
            self.mark(self._membership.members[name])

    def forget(self, member: Member, evaluation: PinnedRollouts | None) -> None:
        """Remove a member that is gone: its name may return on another machine."""
        self.drop(member, evaluation)
        self.rates.forget(member.name)
        self.cooldowns.pop(member.name, None)

    def drop(self, member: Member, evaluation: PinnedRollouts | None) -> None:
        """Offer no slot of `member` until it is marked again."""
        self._changed[member.role].pop(member.name, None)
        for free in (self.routing, self.rewards, self.teachers):
            free.drop(member)
        if evaluation is not None:
            evaluation.routing.drop(member)


def evaluation_slots(member: Member, num_rollouts: int) -> int:
    """Return how many groups of an evaluation a rollout may work on: half of its slots, if it is the only rollout."""
    return member.num_slots if num_rollouts > 1 else (member.num_slots + 1) // 2
