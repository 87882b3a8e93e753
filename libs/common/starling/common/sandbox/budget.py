"""Time that several programs have together, such as a compiler and the tests of what it has made."""

from __future__ import annotations

from typing import Final

_LEAST_S: Final = 0.01
"""With less left nothing is started."""


class TimeBudget:
    """Seconds, of which each program takes those in which it had a processor, or did not want one.

    Args:
        total_s: of all programs.
    """

    def __init__(self, total_s: float) -> None:
        self._left_s = total_s

    @property
    def is_spent(self) -> bool:
        """Whether too little is left for a further program."""
        return self._left_s < _LEAST_S

    def limit(self, timeout_s: float) -> float:
        """Return the time limit of a program that may take at most `timeout_s`."""
        return max(_LEAST_S, min(timeout_s, self._left_s))

    def charge(self, seconds: float) -> None:
        """Note that a program has taken this long."""
        self._left_s -= max(0.0, seconds)
