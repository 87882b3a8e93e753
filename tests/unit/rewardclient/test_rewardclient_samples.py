"""Groups of samples, and their division into requests."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starling.common.errors import ConfigError
from starling.rewardclient.samples import RewardSample, group_indices, split


@pytest.mark.parametrize(
    ("fields", "groups"),
    [
        ([{"group": "a"}, {"group": "b"}, {"group": "a"}], (0, 1, 0)),
        ([{"prompt": "x"}, {"prompt": "y"}, {"prompt": "x"}], (0, 1, 0)),
        ([{"prompt": "x", "reference": "1"}, {"prompt": "x", "reference": "2"}], (0, 1)),
        ([{"metadata": {"a": 1, "b": 2}}, {"metadata": {"b": 2, "a": 1}}, {"metadata": {"a": 1}}], (0, 0, 1)),
        ([{"prompt": "a"}, {"group": "a"}], (0, 1)),
        ([], ()),
    ],
)
def test_groups_are_named_or_have_one_prompt(fields: list[dict[str, Any]], groups: tuple[int, ...]) -> None:
    assert group_indices([RewardSample(**one) for one in fields]) == groups


def test_metadata_that_is_no_json_is_refused() -> None:
    with pytest.raises(ConfigError, match="the metadata of a sample cannot be written as JSON"):
        group_indices([RewardSample(metadata={"a": {1, 2}, "b": object()})])


def test_split_keeps_groups_together_and_forms_apart() -> None:
    found = split([0, 0, 1, 1, 2], ["a", "a", "a", "b", "a"], [1] * 5, max_samples=3, max_bytes=100)
    assert found == [(0, 1, 2), (3,), (4,)]


def test_split_respects_bytes_and_lets_a_large_group_exceed_them() -> None:
    assert split([0, 1, 2], [0] * 3, [6, 6, 3], max_samples=10, max_bytes=9) == [(0,), (1, 2)]
    assert split([0, 0, 1], [0] * 3, [6, 6, 3], max_samples=10, max_bytes=9) == [(0, 1), (2,)]


@given(
    samples=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1), st.integers(0, 20)), max_size=40),
    max_samples=st.integers(1, 8),
    max_bytes=st.integers(1, 60),
)
def test_split_has_each_sample_once_within_the_limits(
    samples: list[tuple[int, int, int]], max_samples: int, max_bytes: int
) -> None:
    groups, forms, sizes = ([one[part] for one in samples] for part in range(3))
    found = split(groups, forms, sizes, max_samples=max_samples, max_bytes=max_bytes)
    assert sorted(index for request in found for index in request) == list(range(len(samples)))
    where = {index: number for number, request in enumerate(found) for index in request}
    for request in found:
        assert len({forms[index] for index in request}) == 1
        if len({groups[index] for index in request}) > 1:
            assert len(request) <= max_samples
            assert sum(sizes[index] for index in request) <= max_bytes
    for first, (group, form, _) in enumerate(samples):
        for second in range(first):
            if samples[second][:2] == (group, form):
                assert where[first] == where[second]
