"""Estimates of completion lengths and of rollout speeds, from the groups that were generated so far.

No estimate decides whether a group may be trained. A wrong one costs time and does no other harm.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field
from typing import Final

from starling.common.ids import Purpose

MAX_PROMPTS: Final = 1 << 18
"""Prompts whose lengths are kept; the oldest go first."""
DECAY: Final = 0.8
"""Weight of all earlier measurements against a new one: about five groups count."""
CLASS_RATIO: Final = math.sqrt(2)
"""Ratio of two neighbouring speed classes. Each class is one more heap to look into for a rollout."""
HYSTERESIS: Final = 0.75
"""A rollout keeps its class while its speed is within this many classes of the middle of that class."""


@dataclass
class LengthEstimates:
    """Tokens of a completion: as measured in an earlier epoch of its prompt, else the mean of the purpose."""

    _of_prompts: dict[str, float] = field(default_factory=dict)
    _means: dict[Purpose, float] = field(default_factory=dict)

    def note(self, prompt_id: str, purpose: Purpose, num_tokens: float) -> None:
        """Note the mean length of the completions of a group."""
        self._means[purpose] = DECAY * self._means.get(purpose, num_tokens) + (1 - DECAY) * num_tokens
        self._of_prompts[row_of(prompt_id)] = num_tokens
        if len(self._of_prompts) > MAX_PROMPTS:
            del self._of_prompts[next(iter(self._of_prompts))]

    def expected(self, prompt_id: str, purpose: Purpose, default: float) -> float:
        """Return the expected length of a completion; `default` before the first measurement."""
        known = self._of_prompts.get(row_of(prompt_id))
        return self._means.get(purpose, default) if known is None else known

    def summary(self) -> tuple[dict[Purpose, float], dict[str, float]]:
        """Return the means, and the measured lengths in the order in which they are dropped."""
        return dict(self._means), dict(self._of_prompts)

    def restore(self, means: dict[Purpose, float], of_prompts: dict[str, float]) -> None:
        """Take over what `summary` has returned."""
        self._means, self._of_prompts = dict(means), dict(of_prompts)


def row_of(prompt_id: str) -> str:
    """Return the name of a prompt without its epoch: ``train/17`` for ``train/0/17``."""
    before, _, row = prompt_id.rpartition("/")
    dataset, slash, _ = before.rpartition("/")
    return f"{dataset}/{row}" if slash else prompt_id


def length_class(num_tokens: int) -> int:
    """Return a class that is greater for longer groups, and equal for groups of about equal length."""
    return round(2 * math.log2(max(1, num_tokens)))


@dataclass(slots=True)
class _Rate:
    """Measurements of one rollout, with decay."""

    tokens: float = 0.0
    seconds: float = 0.0
    number: int = 0
    """Of its class, and below the rate in the middle of the class and the rates at which it leaves it."""
    rate: float = 0.0
    low: float = 0.0
    high: float = 0.0


@dataclass
class RateEstimates:
    """Tokens per second in one slot of each rollout, measured on the groups that it has finished.

    The gauges of an engine cannot serve: they are 0 while it is idle, and a custom engine may report none. Rates are
    rounded to classes, so that a fleet of thousands has a few of them and a rate that varies a little stays the same.
    """

    _known: dict[str, _Rate] = field(default_factory=dict)
    _sorted: list[int] = field(default_factory=list)
    """The class numbers of all rollouts, ascending."""
    _median: float = 1.0

    def note(self, name: str, num_tokens: int, seconds: float) -> None:
        """Note that `name` has finished a group. A group that took no time is ignored."""
        if num_tokens <= 0 or seconds <= 0:
            return
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = _Rate()
        known.tokens = DECAY * known.tokens + num_tokens
        known.seconds = DECAY * known.seconds + seconds
        self._classify(known)

    def note_unfinished(self, name: str, num_tokens: int, seconds: float) -> bool:
        """Note that `name` has not finished a group of about `num_tokens` after `seconds`. Returns whether it is slower
        than it seemed to be: its rate is no more than that, whatever it was before.
        """
        known = self._known.get(name)
        if num_tokens <= 0 or seconds <= 0 or num_tokens / seconds >= (self._median if known is None else known.low):
            return False
        if known is None:
            known = self._known[name] = _Rate()
        known.tokens, known.seconds = float(num_tokens), seconds
        self._classify(known)
        return True

    def _classify(self, known: _Rate) -> None:
        rate = known.tokens / known.seconds
        if not known.low < rate < known.high:
            self._remove_class(known)
            known.number = round(math.log(rate, CLASS_RATIO))
            known.rate = CLASS_RATIO**known.number
            known.low = CLASS_RATIO ** (known.number - HYSTERESIS)
            known.high = CLASS_RATIO ** (known.number + HYSTERESIS)
            bisect.insort(self._sorted, known.number)
            self._median = CLASS_RATIO ** self._sorted[len(self._sorted) // 2]

    def forget(self, name: str) -> None:
        """Drop the measurements of a rollout that is gone: its name may return on another machine."""
        known = self._known.pop(name, None)
        if known is not None:
            self._remove_class(known)

    def rate(self, name: str) -> float:
        """Return the tokens per second in one slot; the median of the others before its first group."""
        known = self._known.get(name)
        return self._median if known is None else known.rate

    def _remove_class(self, known: _Rate) -> None:
        if known.high > 0:
            del self._sorted[bisect.bisect_left(self._sorted, known.number)]
