"""Balancing: every item is in one part, the bounds of the method hold, and a comparison with greedy division."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starling.algo.packing import balance

COSTS = st.lists(st.integers(0, 1000), max_size=40)
FEW = st.lists(st.integers(0, 60), min_size=1, max_size=7)


def loads(costs: list[int], parts: list[list[int]]) -> list[int]:
    return [sum(costs[i] for i in part) for part in parts]


def greedy(costs: list[int], num_parts: int) -> int:
    """Return the largest load when each item, in descending cost, goes to the least loaded part (Graham, 1969)."""
    parts = [0] * num_parts
    for item_cost in sorted(costs, reverse=True):
        parts[parts.index(min(parts))] += item_cost
    return max(parts)


def best(costs: list[int], num_parts: int, *, equal_sizes: bool = False) -> int:
    """Return the least possible largest load, by trying every division."""
    least = sum(costs)
    for owners in itertools.product(range(num_parts), repeat=len(costs)):
        sizes = [owners.count(part) for part in range(num_parts)]
        if not equal_sizes or max(sizes) - min(sizes) <= 1:
            parts = [sum(c for c, owner in zip(costs, owners, strict=True) if owner == p) for p in range(num_parts)]
            least = min(least, max(parts))
    return least


@given(COSTS, st.integers(1, 8), st.booleans())
def test_balance_puts_each_item_in_one_part_deterministically(costs: list[int], n: int, equal: bool) -> None:
    parts = balance(costs, n, equal_sizes=equal)
    assert len(parts) == n
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    assert all(part == sorted(part) for part in parts)
    assert parts == balance(tuple(costs), n, equal_sizes=equal)
    if equal:
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(COSTS.filter(bool), st.integers(1, 8))
def test_spread_is_at_most_the_largest_cost(costs: list[int], n: int) -> None:
    spread = loads(costs, balance(costs, n))
    assert max(spread) - min(spread) <= max(costs)


@given(COSTS.filter(bool), st.integers(1, 8))
def test_spread_with_equal_sizes_is_at_most_that_of_neighbouring_items(costs: list[int], n: int) -> None:
    spread = loads(costs, balance(costs, n, equal_sizes=True))
    ranked = sorted(costs, reverse=True)
    ranked += [0] * (-len(ranked) % n)
    assert max(spread) - min(spread) <= max(ranked[i] - ranked[i + n - 1] for i in range(0, len(ranked), n))


@given(FEW, st.integers(1, 3))
def test_largest_load_is_within_the_known_ratio_of_the_optimum(costs: list[int], n: int) -> None:
    ours = max(loads(costs, balance(costs, n)))
    assert ours >= best(costs, n)
    assert 3 * n * ours <= (4 * n - 1) * best(costs, n)


@given(FEW, st.integers(1, 3))
def test_largest_load_with_equal_sizes_is_at_most_twice_the_optimum(costs: list[int], n: int) -> None:
    ours = max(loads(costs, balance(costs, n, equal_sizes=True)))
    least = best(costs, n, equal_sizes=True)
    assert least <= ours <= 2 * least


@given(COSTS.filter(bool), st.integers(1, 8))
def test_balance_is_at_most_the_known_factor_worse_than_greedy(costs: list[int], n: int) -> None:
    ours = max(loads(costs, balance(costs, n)))
    assert 3 * n * ours <= (4 * n - 1) * greedy(costs, n)


def test_balance_of_typical_lengths_is_far_more_even_than_greedy() -> None:
    draw = random.Random(7)
    ours = theirs = 0.0
    for _ in range(20):
        costs = [int(draw.lognormvariate(6.0, 0.6)) for _ in range(64)]
        mean = sum(costs) / 8
        ours += max(loads(costs, balance(costs, 8))) - mean
        theirs += greedy(costs, 8) - mean
    assert ours < 0.5 * theirs


def test_balance_of_known_cases() -> None:
    # The textbook case: two-way differencing of 8, 7, 6, 5, 4 ends with a difference of 2 (16 and 14).
    assert sorted(loads([8, 7, 6, 5, 4], balance([8, 7, 6, 5, 4], 2))) == [14, 16]
    assert balance([], 2) == [[], []]
    assert balance([5], 3) == [[0], [], []]
    assert balance([1, 1, 1, 1], 2, equal_sizes=True) == [[0, 3], [1, 2]]
    assert balance([3, 1, 2], 1) == [[0, 1, 2]]


def test_invalid_arguments_are_rejected() -> None:
    with pytest.raises(ValueError, match="num_parts is 0"):
        balance([1], 0)
    with pytest.raises(ValueError, match="cost 1 is -1"):
        balance([1, -1], 2)
    with pytest.raises(ValueError, match="cost 0 is nan"):
        balance([float("nan")], 2)
