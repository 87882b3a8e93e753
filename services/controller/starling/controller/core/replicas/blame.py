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

The two that are added keep a replica from being judged by a few groups of others. A scorer may know whom it scores, by
the texts or by the time, and a rollout cannot choose who scores it. So while there are several scorers, the one that
speaks most against a rollout is not heard.
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
MIN_EXCESS_SHARE: Final = 0.25
"""Of the replica's groups. Smaller differences can have honest causes, such as engines of another precision."""
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

    def is_due(self, now: float) -> bool:
        """Say whether a culprit should be looked for, and note that it is."""
        num_pairs = max(len(self.lost), len(self.used))
        if not self._num_counted or now < self.looked_at + LOOK_S_PER_PAIR * num_pairs:
            return False
        self.looked_at = now
        return True

    def culprit(self, role: Role, present: Collection[str], num_counterparts: int) -> tuple[str, str] | None:
        """Return one of the replicas `present` whose groups come to nothing far too often, and a description.

        Args:
            role: of these replicas.
            num_counterparts: replicas on the other side that are in the run.
        """
        is_rollout = role == "rollout"
        for name, excesses in self._excesses(0 if is_rollout else 1).items():
            if name not in present:
                continue
            if is_rollout and num_counterparts > 1:
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
        """Bring new counts to these."""
        self.lost.update(lost)
        self.used.update(used)
        self._num_counted = self.lost.total() + self.used.total()

    def _note_counted(self) -> None:
        self._num_counted += 1
        if self._num_counted >= max(MIN_COUNTED, COUNTED_PER_PAIR * max(len(self.lost), len(self.used))):
            self.lost, self.used = (
                Counter({pair: num // 2 for pair, num in counts.items() if num > 1})
                for counts in (self.lost, self.used)
            )
            self._num_counted = self.lost.total() + self.used.total()

    def _excesses(self, side: int) -> dict[str, list[_Excess]]:
        """Return, for each replica of one side of the pairs, its excess with each of its counterparts."""
        pairs = [pair for pair in sorted({*self.lost, *self.used}) if all(pair)]
        lost, num = Counter[str](), Counter[str]()
        for pair in pairs:
            lost[pair[1 - side]] += self.lost[pair]
            num[pair[1 - side]] += self.lost[pair] + self.used[pair]
        found: dict[str, list[_Excess]] = {}
        for pair in pairs:
            counterpart, own_lost = pair[1 - side], self.lost[pair]
            own = own_lost + self.used[pair]
            num_others = num[counterpart] - own + 2
            share = (lost[counterpart] - own_lost + 2) / num_others
            variance = own * share * (1 - share) * (1 + own / num_others)
            found.setdefault(pair[side], []).append(_Excess(own, own_lost - own * share, variance))
        return found
