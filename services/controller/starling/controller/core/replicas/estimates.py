"""What is to be expected of prompts and rollouts, from what came of them so far: how long a group is, how fast a slot.

Nothing here decides whether a group may be trained: an expectation that is wrong costs time, and harms nothing.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field
from typing import Final

from starling.common.ids import Purpose

MOST_PROMPTS: Final = 1 << 18
"""Of so many prompts the length is known; beyond, those go first that came first."""
FADE: Final = 0.8
"""Weight of all that was measured before, against what is measured now: some five groups count."""
STEP: Final = math.sqrt(2)
"""Ratio of two neighbouring classes of speed. Each class is one more place to look for a rollout."""
STAYS: Final = 0.75
"""A rollout stays in its class while it is no further than so many classes from its middle."""


@dataclass
class LengthEstimates:
    """Tokens of a completion, by prompt from earlier passes over the data, else the mean of the purpose."""

    _of_prompts: dict[str, float] = field(default_factory=dict)
    _means: dict[Purpose, float] = field(default_factory=dict)

    def note(self, prompt_id: str, purpose: Purpose, num_tokens: float) -> None:
        """Note the mean length of the completions of a group."""
        self._means[purpose] = FADE * self._means.get(purpose, num_tokens) + (1 - FADE) * num_tokens
        self._of_prompts[row_of(prompt_id)] = num_tokens
        if len(self._of_prompts) > MOST_PROMPTS:
            del self._of_prompts[next(iter(self._of_prompts))]

    def expected(self, prompt_id: str, purpose: Purpose, otherwise: float) -> float:
        """Return how long a completion will be; `otherwise` while nothing is known at all."""
        known = self._of_prompts.get(row_of(prompt_id))
        return self._means.get(purpose, otherwise) if known is None else known


def row_of(prompt_id: str) -> str:
    """Return what a prompt is called in every pass over the data: ``train/17`` for ``train/0/17``."""
    before, _, row = prompt_id.rpartition("/")
    dataset, slash, _ = before.rpartition("/")
    return f"{dataset}/{row}" if slash else prompt_id


def length_class(num_tokens: int) -> int:
    """Return what is greater for longer groups, and the same for those whose lengths hardly differ."""
    return round(2 * math.log2(max(1, num_tokens)))


@dataclass(slots=True)
class _Rate:
    """What is known of one rollout; of its groups, what was long ago counts for less."""

    tokens: float = 0.0
    seconds: float = 0.0
    number: int = 0
    """Of its class, and below the rate in its middle and those at which it leaves it."""
    rate: float = 0.0
    low: float = 0.0
    high: float = 0.0


@dataclass
class RateEstimates:
    """Tokens a second in one slot of each rollout, measured from the groups that it has finished.

    Not from what an engine says of itself: that is 0 while it has nothing to do, and a user's engine may say nothing.
    Rates are kept as classes, so that a fleet of thousands has a few of them, and one that wavers stays where it is.
    """

    _known: dict[str, _Rate] = field(default_factory=dict)
    _sorted: list[int] = field(default_factory=list)
    """The classes of all, ascending."""
    _median: float = 1.0

    def note(self, name: str, num_tokens: int, seconds: float) -> None:
        """Note that `name` has finished a group; what took no time says nothing."""
        if num_tokens <= 0 or seconds <= 0:
            return
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = _Rate()
        known.tokens = FADE * known.tokens + num_tokens
        known.seconds = FADE * known.seconds + seconds
        rate = known.tokens / known.seconds
        if not known.low < rate < known.high:
            self._forget_class(known)
            known.number = round(math.log(rate, STEP))
            known.rate = STEP**known.number
            known.low, known.high = STEP ** (known.number - STAYS), STEP ** (known.number + STAYS)
            bisect.insort(self._sorted, known.number)
            self._median = STEP ** self._sorted[len(self._sorted) // 2]

    def forget(self, name: str) -> None:
        """`name` is gone; who comes back under that name may run on another machine."""
        known = self._known.pop(name, None)
        if known is not None:
            self._forget_class(known)

    def rate(self, name: str) -> float:
        """Return the tokens a second in one slot; for who has finished nothing yet, the median of the others."""
        known = self._known.get(name)
        return self._median if known is None else known.rate

    def _forget_class(self, known: _Rate) -> None:
        if known.high > 0:
            del self._sorted[bisect.bisect_left(self._sorted, known.number)]
