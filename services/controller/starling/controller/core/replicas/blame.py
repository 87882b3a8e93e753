"""Counts of groups that came to nothing, by the two replicas that had to do with each, and the one that is at fault.

A rollout generates a group, and a reward replica or a teacher scores it. A group may come to nothing because of either:
the scorer fails, or nothing can score what was generated. Or dynamic sampling filters it out, because its rewards are
all equal, as those of completions that are all the same, or of a reward replica that lies.

Prompts are distributed without a look at them, so but for chance the groups of each rollout, and those that each scorer
is given, come to nothing equally often. For a replica the expected number is, for each counterpart (a scorer for a
rollout, a rollout for a scorer), the number of groups that both had to do with, times the share of the counterpart's
other groups that came to nothing:

    excess   = sum over counterparts of  lost - num p,    p = (lost of the others + 2) / (num of the others + 2)
    variance = sum over counterparts of  num p (1 - p) (1 + num / (num of the others + 2))

The two that are added keep a replica from being judged by a few groups of others. Only first tries count, because who
gets a further one depends on who failed the one before. No single replica may have others judged:

- The counterpart that speaks most against a replica is not heard, where there are several. A scorer may know whom it
  scores, by the texts or by the time, and a rollout may choose its scorer, by answering when only that one is free.
- Where groups may come to nothing by a replica's choice, `without_best` leaves out the one of the others that lowers
  their share most: a liar could keep all of its groups. So it takes three of a role to judge one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from typing import Final, NamedTuple

from starling.common.ids import Role

MIN_COUNTED: Final = 1024
COUNTED_PER_PAIR: Final = 16
"""At this number of groups, or this many for each rollout with each scorer, all counts are halved, so that a replica is
judged by what it did lately."""
MIN_EXCESS: Final = 8
MIN_EXCESS_SHARE: Final = 0.5
"""Of the replica's groups. Smaller differences can have honest causes: the longest prompts go to the fastest rollouts,
and long prompts may be harder."""
NUM_DEVIATIONS: Final = 6.0
"""Excess in standard deviations: chance leads to it once in a billion times."""
LOOK_S_PER_PAIR: Final = 1e-3
"""A culprit is looked for after this time for each pair, at least: a look takes microseconds for each."""

Pair = tuple[str, str]
"""A rollout and a scorer. A name is empty if it is not known."""


class _Excess(NamedTuple):
    num: int
    """Groups of the replica and the counterpart."""
    lost: float
    """How many more of them came to nothing than expected."""
    variance: float


class _Cell(NamedTuple):
    name: str
    """The replica."""
    lost: int
    num: int
    """Its groups with one counterpart."""


class PairCounts:
    """How many groups of each rollout and each scorer came to nothing, and how many did not."""

    def __init__(self) -> None:
        self.lost: Counter[Pair] = Counter()
        self.used: Counter[Pair] = Counter()
        self.looked_at = -math.inf
        """When a culprit was looked for, by the clock of events."""
        self._num_counted = 0

    def note_lost(self, rollout: str, scorer: str) -> None:
        """Count a group that came to nothing."""
        self.lost[rollout, scorer] += 1
        self._note_counted()

    def note_used(self, rollout: str, scorer: str) -> None:
        """Count a group that is of use; a run in which none came to nothing lately counts none."""
        if self._num_counted:
            self.used[rollout, scorer] += 1
            self._note_counted()

    def forget(self, name: str) -> None:
        """Count the groups of a replica anew."""
        for counts in (self.lost, self.used):
            for pair in [pair for pair in counts if name in pair]:
                self._num_counted -= counts.pop(pair)

    def clear(self) -> None:
        """Count the groups of all replicas anew."""
        self.restore({}, {})

    def is_due(self, now: float) -> bool:
        """Say whether a culprit should be looked for, and note that it is."""
        num_pairs = max(len(self.lost), len(self.used))
        if not self._num_counted or now < self.looked_at + LOOK_S_PER_PAIR * num_pairs:
            return False
        self.looked_at = now
        return True

    def culprit(
        self, role: Role, present: Collection[str], num_counterparts: int, *, without_best: bool
    ) -> tuple[str, str] | None:
        """Return one of the replicas `present` whose groups come to nothing far too often, and a description.

        Args:
            role: of these replicas.
            num_counterparts: replicas on the other side that are in the run.
            without_best: leave out the one of the others that lowers their share most.
        """
        for name, excesses in self._excesses(0 if role == "rollout" else 1, without_best=without_best).items():
            if name not in present:
                continue
            if num_counterparts > 1:
                excesses.remove(max(excesses, key=lambda one: one.lost))
            num, lost, variance = (sum(column) for column in zip(_Excess(0, 0.0, 0.0), *excesses, strict=True))
            if lost >= max(MIN_EXCESS, MIN_EXCESS_SHARE * num, NUM_DEVIATIONS * math.sqrt(variance)):
                return name, f"{lost:.0f} more of {num:.0f} groups than others"
        return None

    def fails_alone(self, rollout: str, scorer: str) -> bool:
        """Say whether no other scorer failed more groups of a rollout than it scored."""
        others = [pair for pair in {*self.lost, *self.used} if pair[0] == rollout and pair[1] != scorer]
        return sum(self.lost[pair] for pair in others) <= sum(self.used[pair] for pair in others)

    def restore(self, lost: dict[Pair, int], used: dict[Pair, int]) -> None:
        """Replace the counts by these."""
        self.lost, self.used = Counter(lost), Counter(used)
        self._num_counted = self.lost.total() + self.used.total()

    def _note_counted(self) -> None:
        self._num_counted += 1
        if self._num_counted >= max(MIN_COUNTED, COUNTED_PER_PAIR * max(len(self.lost), len(self.used))):
            self.lost, self.used = (
                Counter({pair: num // 2 for pair, num in counts.items() if num > 1})
                for counts in (self.lost, self.used)
            )
            self._num_counted = self.lost.total() + self.used.total()

    def _excesses(self, side: int, *, without_best: bool) -> dict[str, list[_Excess]]:
        """Return, for each replica of one side of the pairs, its excess with each of its counterparts."""
        found: dict[str, list[_Excess]] = {}
        of_counterpart: dict[str, list[_Cell]] = {}
        for pair in sorted({*self.lost, *self.used}):
            if all(pair):
                cell = _Cell(pair[side], self.lost[pair], self.lost[pair] + self.used[pair])
                of_counterpart.setdefault(pair[1 - side], []).append(cell)
        for cells in of_counterpart.values():
            lost, num = (sum(column) for column in list(zip(*cells, strict=True))[1:])
            by_share = sorted(cells, key=lambda cell: (lost - cell.lost + 2) / (num - cell.num + 2), reverse=True)[:2]
            for own in cells:
                others_lost, num_others = lost - own.lost, num - own.num
                best = next((cell for cell in by_share if cell is not own), None)
                if without_best and best is not None:
                    others_lost, num_others = others_lost - best.lost, num_others - best.num
                share = (others_lost + 2) / (num_others + 2)
                variance = own.num * share * (1 - share) * (1 + own.num / (num_others + 2))
                found.setdefault(own.name, []).append(_Excess(own.num, own.lost - own.num * share, variance))
        return found
