"""Filtered groups: how many in a row, and of which rollouts and reward replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Final

import msgspec

from starling.common.ids import Role
from starling.controller.core.replicas.blame import Pair, PairCounts

SIDES: Final[tuple[Role, Role]] = ("rollout", "reward")
"""Roles of a pair."""


class FilterCount(msgspec.Struct, frozen=True, gc=False):
    """Groups of one rollout and one reward replica; a name is empty if it is not known."""

    rollout: str
    reward: str
    num_filtered: int
    num_kept: int
    in_a_row: int
    """Filtered out since the last group of any replica that was kept."""


class FilteredGroups:
    """Counts of the groups that were filtered out, and of those that were kept."""

    def __init__(self) -> None:
        self.num_in_a_row = 0
        """Groups filtered out since the last one that was kept."""
        self.counts = PairCounts()
        self._in_a_row: Counter[Pair] = Counter()

    def note_filtered(self, rollout: str, reward: str, *, is_first_try: bool) -> None:
        """Count a group that was filtered out."""
        self.num_in_a_row += 1
        self._in_a_row[rollout, reward] += 1
        if is_first_try:
            self.counts.note_lost(rollout, reward)

    def note_kept(self, rollout: str, reward: str, *, is_first_try: bool) -> None:
        """Count a group that was kept."""
        if self.num_in_a_row:
            self.clear_row()
        if is_first_try:
            self.counts.note_used(rollout, reward)

    def forget(self, name: str) -> None:
        """Count the groups of a replica, and those in a row, anew."""
        self.counts.forget(name)
        self.clear_row()

    def in_a_row_of(self, role: Role) -> Counter[str]:
        """Return how many of the groups in a row each replica of a role had to do with."""
        by_name: Counter[str] = Counter()
        for pair, num in self._in_a_row.items():
            by_name[pair[SIDES.index(role)]] += num
        return by_name

    def num_of_several(self, present: Callable[[Role], Collection[str]]) -> int:
        """Return how many groups were filtered out in a row, whichever single replica lies.

        Args:
            present: returns the replicas of a role. Where there are several, the one that led to the most of the row
                does not count, nor do those that have left.
        """
        return min(self._of_several(role, present(role)) for role in SIDES)

    def summary(self) -> tuple[FilterCount, ...]:
        """Return all counts."""
        lost, used = self.counts.lost, self.counts.used
        pairs = sorted({*lost, *used, *self._in_a_row})
        return tuple(FilterCount(*pair, lost[pair], used[pair], self._in_a_row[pair]) for pair in pairs)

    def restore(self, summary: tuple[FilterCount, ...]) -> None:
        """Bring new counts to those of `summary`."""
        by_pair = {(one.rollout, one.reward): one for one in summary}
        self.counts.restore(
            {pair: one.num_filtered for pair, one in by_pair.items() if one.num_filtered},
            {pair: one.num_kept for pair, one in by_pair.items() if one.num_kept},
        )
        self._in_a_row.update({pair: one.in_a_row for pair, one in by_pair.items() if one.in_a_row})
        self.num_in_a_row = self._in_a_row.total()

    def clear_row(self) -> None:
        """Begin to count groups in a row anew."""
        self.num_in_a_row = 0
        self._in_a_row.clear()

    def _of_several(self, role: Role, present: Collection[str]) -> int:
        by_name = self.in_a_row_of(role)
        of_present = [by_name[name] for name in present]
        return by_name[""] + sum(of_present) - (max(of_present) if len(of_present) > 1 else 0)


def of_unknown(num_in_a_row: int) -> tuple[FilterCount, ...]:
    """Return the counts of a journal that does not say which replicas had to do with filtered groups."""
    return (FilterCount("", "", 0, 0, num_in_a_row),) if num_in_a_row else ()
