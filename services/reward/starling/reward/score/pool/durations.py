"""Expected durations of calls, from those that were made."""

from __future__ import annotations

from typing import Final

from starling.reward.score.pool.call import Call
from starling.reward.score.scorers.batch import MAX_BATCH, ScorerForm

_UNKNOWN_S: Final = 0.05
"""Expected seconds of a call before the first measurement: one call at a time."""
_SHORT_S: Final = 0.001
"""Expected seconds of a call of a function for several completions: their reports would cost more than the work."""
_NEWEST: Final = 0.3
"""Weight of a new measurement in the moving average."""


class CallDurations:
    """Moving averages of what calls take: of one call, or of one completion where a function judges it.

    Args:
        num_scorers: of the pool.
    """

    def __init__(self, num_scorers: int) -> None:
        self._expected_s = [_UNKNOWN_S] * num_scorers

    def expected_s(self, call: Call, form: ScorerForm) -> float:
        """Return the expected seconds of a call."""
        return self._expected_s[call.scorer] * _num_units(call, form)

    def record(self, call: Call, form: ScorerForm, seconds: float) -> None:
        """Note how long a call has taken."""
        took_s = seconds / _num_units(call, form)
        self._expected_s[call.scorer] += _NEWEST * (took_s - self._expected_s[call.scorer])

    def short_batch(self, scorer: int) -> int:
        """Return how many completions a call of a function may have, so that it takes about `_SHORT_S`."""
        return max(1, int(min(MAX_BATCH, _SHORT_S / max(self._expected_s[scorer], 1e-9))))


def _num_units(call: Call, form: ScorerForm) -> int:
    return len(call.positions) if form.is_function else 1
