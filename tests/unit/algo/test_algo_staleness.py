"""The staleness bound, checked by random sequences of admission, training and retirement."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starling.algo.staleness import num_slots, oldest_allowed_version, staleness


def test_staleness_counts_versions_behind_the_base() -> None:
    assert staleness(step=5, oldest_version=4) == 0
    assert staleness(step=5, oldest_version=2) == 2


@given(st.integers(0, 200), st.integers(1, 7), st.integers(0, 5))
def test_oldest_allowed_version_is_the_oldest_within_the_bound(group: int, prompts: int, bound: int) -> None:
    step = group // prompts + 1
    required = oldest_allowed_version(0, group, prompts, bound)
    assert staleness(step, required) == bound
    assert staleness(step, required - 1) > bound


@given(st.integers(1, 5), st.integers(0, 4), st.lists(st.booleans(), max_size=200))
def test_slots_admit_a_group_only_when_its_required_version_is_published(
    prompts: int, bound: int, choices: list[bool]
) -> None:
    admitted = published = 0
    reached = 0
    for admit in choices:
        in_use = admitted - published * prompts
        if admit and in_use < num_slots(prompts, bound):
            assert published >= oldest_allowed_version(0, admitted, prompts, bound)
            admitted += 1
        elif in_use >= prompts:
            published += 1
        reached = max(reached, admitted - published * prompts)
    assert reached <= num_slots(prompts, bound)


@given(st.integers(1, 5), st.integers(0, 4))
def test_every_slot_can_be_used_without_a_publication(prompts: int, bound: int) -> None:
    slots = num_slots(prompts, bound)
    assert oldest_allowed_version(0, slots - 1, prompts, bound) == 0
    assert oldest_allowed_version(0, slots, prompts, bound) == 1


@pytest.mark.parametrize(
    ("prompts", "bound", "text"), [(0, 0, "prompts_per_step is 0"), (1, -1, "max_staleness is -1")]
)
def test_invalid_arguments_are_rejected(prompts: int, bound: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        num_slots(prompts, bound)
    with pytest.raises(ValueError, match=text):
        oldest_allowed_version(0, 0, prompts, bound)


def test_negative_rank_is_rejected() -> None:
    with pytest.raises(ValueError, match="rank is -1"):
        oldest_allowed_version(0, -1, 1, 0)
