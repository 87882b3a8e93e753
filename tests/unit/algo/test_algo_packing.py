"""Packing: every sequence is in one row, budgets hold, and waste is counted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starling.algo.packing import pack, pad

LENGTHS = st.lists(st.integers(1, 60), max_size=40)


@given(LENGTHS, st.integers(1, 80))
def test_pack_puts_each_sequence_in_one_row_without_overflow(lengths: list[int], row_tokens: int) -> None:
    rows = pack(lengths, row_tokens)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    for row in rows:
        assert row == sorted(row)
        assert len(row) == 1 or sum(lengths[i] for i in row) <= row_tokens


@given(LENGTHS, st.integers(60, 200))
def test_pack_leaves_at_most_one_row_half_empty(lengths: list[int], row_tokens: int) -> None:
    used = [sum(lengths[i] for i in row) for row in pack(lengths, row_tokens)]
    assert sum(2 * tokens <= row_tokens for tokens in used) <= 1


def test_pack_known_case_of_first_fit_decreasing() -> None:
    assert pack([4, 8, 1, 4, 2, 1], 10) == [[1, 4], [0, 2, 3, 5]]


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 3)), max_size=40), st.integers(1, 300))
def test_padded_microbatches_are_within_the_budget(items: list[tuple[int, int]], budget: int) -> None:
    lengths, counts = [length for length, _ in items], [count for _, count in items]
    parts = pad(lengths, counts, budget)
    assert sorted(index for part in parts for index in part) == list(range(len(items)))
    for part in parts:
        slots = max(lengths[i] for i in part) * sum(counts[i] for i in part)
        assert slots <= budget or len(part) == 1


def test_padded_microbatches_hold_items_of_like_length() -> None:
    assert pad([3, 9, 3, 8], [1, 1, 1, 1], 18) == [[1, 3], [0, 2]]


def test_invalid_arguments_are_rejected() -> None:
    with pytest.raises(ValueError, match="tokens_per_microbatch is 0"):
        pad([1], [1], 0)
    with pytest.raises(ValueError, match="row_tokens is 0"):
        pack([1], 0)
    with pytest.raises(ValueError, match="sequence 1 has 0 tokens"):
        pad([3, 0], [1, 1], 10)
