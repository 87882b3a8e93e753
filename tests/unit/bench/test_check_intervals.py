"""Confidence intervals of paired ratios, against the published tables of the signed-rank test."""

from __future__ import annotations

import math
from itertools import product

import pytest
from check_intervals import Ratio, is_regression, paired_ratio, signed_rank_counts, signed_rank_cut

# Two-sided critical values of the Wilcoxon signed-rank test (Wilcoxon and Wilcox 1964, as in every textbook).
CRITICAL_95 = {
    6: 0,
    7: 2,
    8: 3,
    9: 5,
    10: 8,
    11: 10,
    12: 13,
    13: 17,
    14: 21,
    15: 25,
    16: 29,
    17: 34,
    18: 40,
    19: 46,
    20: 52,
}
CRITICAL_99 = {8: 0, 9: 1, 10: 3, 11: 5, 12: 7, 13: 9, 14: 12, 15: 15, 16: 19, 17: 23, 18: 27, 19: 32, 20: 37}


def test_critical_values_are_those_of_the_tables() -> None:
    assert {num: signed_rank_cut(num, 0.95) for num in CRITICAL_95} == CRITICAL_95
    assert {num: signed_rank_cut(num, 0.99) for num in CRITICAL_99} == CRITICAL_99


def test_counts_are_the_exact_distribution_of_the_statistic() -> None:
    assert signed_rank_counts(3) == [1, 1, 1, 2, 1, 1, 1]
    assert signed_rank_counts(4) == [1, 1, 1, 2, 2, 2, 2, 2, 1, 1, 1]
    assert sum(signed_rank_counts(12)) == 2**12


@pytest.mark.parametrize(("num", "confidence"), [(5, 0.95), (1, 0.95), (7, 0.99)])
def test_too_few_rounds_are_refused(num: int, confidence: float) -> None:
    with pytest.raises(ValueError, match=f"{num} rounds give no interval of confidence {confidence}"):
        signed_rank_cut(num, confidence)


def test_six_rounds_give_their_extremes_and_the_median_of_the_walsh_averages() -> None:
    ratio = paired_ratio([1, 2, 4, 1, 1, 1], [1.0, 2 * math.e, 4 * math.e**2, math.e**3, math.e**4, math.e**5])
    assert [math.log(one) for one in (ratio.value, ratio.low, ratio.high)] == pytest.approx([2.5, 0.0, 5.0])


def test_eight_rounds_cut_three_walsh_averages_on_each_side() -> None:
    """By hand, of the logarithms 0, 1, 3, 7, 15, 31, 63 and 127."""
    logs = [2**power - 1 for power in range(8)]
    ratio = paired_ratio([1.0] * 8, [math.exp(log) for log in logs])
    averages = sorted((a + b) / 2 for i, a in enumerate(logs) for b in logs[i:])
    assert averages[:4] == [0, 0.5, 1, 1.5]
    assert averages[-4:] == [71, 79, 95, 127]
    assert (math.log(ratio.low), math.log(ratio.high)) == pytest.approx((1.5, 71))


@pytest.mark.parametrize("num", [6, 7, 8, 9])
def test_intervals_miss_a_true_ratio_of_one_as_often_as_the_distribution_says(num: int) -> None:
    """Without a difference every pattern of signs is equally likely; all of them are counted."""
    sizes = [1.7**rank for rank in range(num)]
    above = below = 0
    for signs in product((-1, 1), repeat=num):
        logs = [sign * size / 1000 for sign, size in zip(signs, sizes, strict=True)]
        ratio = paired_ratio([1.0] * num, [math.exp(log) for log in logs])
        above, below = above + (ratio.low > 1), below + (ratio.high < 1)
    assert above == below == sum(signed_rank_counts(num)[: CRITICAL_95[num] + 1])
    assert (above + below) / 2**num <= 0.05


def test_one_disturbed_round_of_eight_neither_hides_nor_makes_a_regression() -> None:
    quiet = [1.00, 1.01, 0.99, 1.02, 0.98, 1.00, 1.01]
    assert not is_regression(paired_ratio([1.0] * 8, [*quiet, 9.0]), 0.07)
    assert is_regression(paired_ratio([1.0] * 8, [*(1.15 * one for one in quiet), 1.15 / 1.04]), 0.07)
    assert is_regression(paired_ratio([1.0] * 8, [*(1.15 * one for one in quiet), 9.0]), 0.07)


def test_regression_needs_the_whole_interval_beyond_the_tolerance() -> None:
    assert is_regression(Ratio(1.15, 1.08, 1.22), 0.07)
    assert not is_regression(Ratio(1.15, 1.06, 1.25), 0.07)
    assert not is_regression(Ratio(0.8, 0.7, 0.9), 0.07)
