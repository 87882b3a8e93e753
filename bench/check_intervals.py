"""Confidence interval of a ratio from paired rounds, and the verdict of `make bench-check` about a figure.

A round measures a figure before and after a change, one directly after the other. The logarithms of the rounds' ratios
are a sample whose centre is estimated without assuming a normal distribution, because other load of the machine
disturbs single rounds by any amount: the estimate is the Hodges-Lehmann estimator, the median of the Walsh averages
(of all pairs of rounds, each round with itself included), and the interval is the one that belongs to the exact
Wilcoxon signed-rank test (Hollander, Wolfe and Chicken, Nonparametric Statistical Methods, 3rd edition, 3.2 and 3.3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

CONFIDENCE = 0.95
MIN_ROUNDS = 6
"""Fewer rounds give no interval of this confidence: 5 signs agree by chance with a probability of 1/16."""


@dataclass(frozen=True)
class Ratio:
    """Estimate of the ratio after over before, with its confidence interval."""

    value: float
    low: float
    high: float


def paired_ratio(before: Sequence[float], after: Sequence[float], confidence: float = CONFIDENCE) -> Ratio:
    """Return the ratio of two positive figures that were measured in the same rounds, at least `MIN_ROUNDS` of them."""
    logs = [math.log(b / a) for a, b in zip(before, after, strict=True)]
    averages = sorted((one + other) / 2 for i, one in enumerate(logs) for other in logs[i:])
    cut = signed_rank_cut(len(logs), confidence)
    return Ratio(math.exp(median(averages)), math.exp(averages[cut]), math.exp(averages[-1 - cut]))


def signed_rank_cut(num: int, confidence: float = CONFIDENCE) -> int:
    """Return how many Walsh averages lie outside of the interval on each side.

    It is the critical value of the test: the greatest `k` with a probability of at most (1 - confidence) / 2 that the
    signed-rank statistic of `num` pairs without any difference is `k` or less.
    """
    counts = signed_rank_counts(num)
    allowed = (1 - confidence) / 2 * 2**num
    if counts[0] > allowed:
        raise ValueError(f"{num} rounds give no interval of confidence {confidence:g}; measure at least {MIN_ROUNDS}")
    total, cut = 0, 0
    while total + counts[cut] <= allowed:
        total += counts[cut]
        cut += 1
    return cut - 1


def signed_rank_counts(num: int) -> list[int]:
    """Return the number of sign patterns of `num` ranks for each value of the statistic, the sum of positive ranks."""
    counts = [1] + [0] * (num * (num + 1) // 2)
    for rank in range(1, num + 1):
        for total in range(len(counts) - 1, rank - 1, -1):
            counts[total] += counts[total - rank]
    return counts


def is_regression(ratio: Ratio, tolerance: float) -> bool:
    """Say whether a cost grew by more than `tolerance`, with the whole interval beyond it."""
    return ratio.low > 1 + tolerance
