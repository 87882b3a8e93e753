"""From the outcomes of comparisons between pairs to a score of each completion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

Rank = Literal["win_rate", "bradley_terry"]
Wins = Mapping[tuple[int, int], float]
"""Of a pair (i, j) with i < j the share that i has won, from 0 to 1; 0.5 is a tie."""
_PRIOR: Final = 0.5
"""Wins, and as many losses, of each completion against one of average strength. Without these one that has won always
would be infinitely strong."""
_MOST_ROUNDS: Final = 10_000
_CLOSE: Final = 1e-12


def win_rates(num: int, wins: Wins) -> list[float | None]:
    """Return the share of its comparisons that each of `num` completions has won; None without a comparison."""
    won, compared = [0.0] * num, [0] * num
    for (first, second), share in wins.items():
        won[first] += share
        won[second] += 1.0 - share
        compared[first] += 1
        compared[second] += 1
    return [total / count if count else None for total, count in zip(won, compared, strict=True)]


def bradley_terry(num: int, wins: Wins) -> list[float | None]:
    """Return for each of `num` completions the probability that it wins against one of average strength.

    The strengths have the largest posterior probability in the model of Bradley and Terry, found by minorisation and
    maximisation (Hunter, 2004); see `_PRIOR`. None without a comparison.
    """
    won = [_PRIOR] * num
    opponents: list[list[int]] = [[] for _ in range(num)]
    for (first, second), share in wins.items():
        won[first] += share
        won[second] += 1.0 - share
        opponents[first].append(second)
        opponents[second].append(first)
    strength = [1.0] * num
    for _ in range(_MOST_ROUNDS):
        new = [
            won[one] / (2 * _PRIOR / (own + 1.0) + sum(1.0 / (own + strength[other]) for other in opponents[one]))
            for one, own in enumerate(strength)
        ]
        change = max((abs(a - b) / b for a, b in zip(new, strength, strict=True)), default=0.0)
        strength = new
        if change < _CLOSE:
            break
    return [own / (own + 1.0) if opponents[one] else None for one, own in enumerate(strength)]
