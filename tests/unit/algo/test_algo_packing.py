"""Packing: every sequence is in one row, budgets hold, and waste is counted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starling.algo.packing import Microbatch, cost, num_token_slots, pack, padding_waste, plan_microbatches

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


@given(LENGTHS, st.integers(1, 300), st.none() | st.integers(1, 100))
def test_microbatches_are_within_the_budget(lengths: list[int], budget: int, row_tokens: int | None) -> None:
    plan = plan_microbatches(lengths, budget, row_tokens=row_tokens)
    assert sorted(index for batch in plan for row in batch.rows for index in row) == list(range(len(lengths)))
    for batch in plan:
        used = [sum(lengths[i] for i in row) for row in batch.rows]
        assert max(used) == batch.row_tokens
        alone = len(batch.rows) == 1 and len(batch.rows[0]) == 1
        assert batch.num_token_slots <= budget or (alone and lengths[batch.rows[0][0]] > budget)


@given(LENGTHS, st.integers(1, 300))
def test_plan_is_deterministic_and_its_waste_is_exact(lengths: list[int], budget: int) -> None:
    plan = plan_microbatches(lengths, budget)
    assert plan == plan_microbatches(list(lengths), budget)
    waste = padding_waste(plan, lengths)
    assert 0.0 <= waste < 1.0
    assert waste * num_token_slots(plan) == pytest.approx(num_token_slots(plan) - sum(lengths))


@given(LENGTHS.filter(bool), st.integers(60, 300))
def test_chosen_row_length_costs_at_most_as_much_as_padding(lengths: list[int], budget: int) -> None:
    chosen = plan_microbatches(lengths, budget)
    padded = plan_microbatches(lengths, budget, row_tokens=max(lengths))
    assert cost(chosen) <= cost(padded)


def test_equal_lengths_get_one_row_each() -> None:
    assert plan_microbatches([25] * 6, 1000) == [Microbatch(rows=((0,), (1,), (2,), (3,), (4,), (5,)), row_tokens=25)]


def test_long_sequence_does_not_pad_short_ones() -> None:
    lengths = [100] + [10] * 20
    plan = plan_microbatches(lengths, 1000)
    assert padding_waste(plan, lengths) == 0.0


def test_microbatches_have_nearly_equal_numbers_of_rows() -> None:
    plan = plan_microbatches([10] * 7, 30, row_tokens=10)
    assert [len(batch.rows) for batch in plan] == [3, 2, 2]


def test_no_sequences_give_no_microbatches() -> None:
    assert plan_microbatches([], 10) == []
    assert padding_waste([], []) == 0.0


def test_invalid_arguments_are_rejected() -> None:
    with pytest.raises(ValueError, match="tokens_per_microbatch is 0"):
        plan_microbatches([1], 0)
    with pytest.raises(ValueError, match="row_tokens is 0"):
        pack([1], 0)
    with pytest.raises(ValueError, match="sequence 1 has 0 tokens"):
        plan_microbatches([3, 0], 10)
