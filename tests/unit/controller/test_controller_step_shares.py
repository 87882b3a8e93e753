"""How the groups of a step are dispatched to several policies."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from starling.common.wire.messages import Prompt, TensorMeta
from starling.controller.core.groups.group import Group
from starling.controller.core.training.shares import group_shares

LENGTHS = st.lists(st.integers(0, 10_000), min_size=1, max_size=40)


def groups_of(lengths: list[int]) -> list[Group]:
    """Make groups of so many tokens of completions, with prompts of one token."""
    return [
        Group(
            index,
            Prompt(id=str(index), text=""),
            "train",
            tensors=(
                TensorMeta(dtype="int32", shape=(1,), nbytes=4),
                TensorMeta(dtype="int32", shape=(length,), nbytes=4 * length),
                TensorMeta(dtype="float32", shape=(10_000,), nbytes=40_000),
            ),
        )
        for index, length in enumerate(lengths)
    ]


def tokens(share: list[Group]) -> int:
    return sum(meta.shape[0] for group in share for meta in group.tensors[:2])


@given(lengths=LENGTHS, num=st.integers(1, 8))
def test_shares_hold_every_group_once_and_are_even(lengths: list[int], num: int) -> None:
    shares = group_shares(groups_of(lengths), num)
    assert len(shares) == num
    dispatched = [group.ordinal for share in shares for group in share]
    assert sorted(dispatched) == list(range(len(lengths)))
    assert all(share == sorted(share, key=lambda group: group.ordinal) for share in shares)
    assert sum(not share for share in shares) == max(0, num - len(lengths))
    sizes = [tokens(share) for share in shares]
    assert max(sizes) - min(sizes) <= max(lengths) + 2, "shares differ by at most the longest group"


@given(lengths=LENGTHS, num=st.integers(1, 8))
def test_group_shares_are_deterministic(lengths: list[int], num: int) -> None:
    first, second = (
        [[group.ordinal for group in share] for share in group_shares(groups_of(lengths), num)] for _ in range(2)
    )
    assert first == second


def test_queue_length_counts_tokens_and_not_groups() -> None:
    shares = group_shares(groups_of([90, 30, 30, 30, 10, 10]), 2)
    assert [[group.ordinal for group in share] for share in shares] == [[0, 4], [1, 2, 3, 5]]


def test_one_policy_gets_all_in_order() -> None:
    groups = groups_of([3, 9, 1, 4])
    assert group_shares(groups, 1) == [groups]
