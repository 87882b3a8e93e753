"""Sizes of a mesh: which fit, and what is said of those that do not."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from starling.common.errors import ConfigError
from starling.policy.settings.parallel import ParallelSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.learner import Learner
from starling.policy.train.parallel.mesh import AXES, check_sizes
from starling.policy.train.parallel.passes import divide_passes


def sizes(**given: int) -> dict[str, int]:
    """Return the size of every axis."""
    return {axis: given.get(axis, 1) for axis in AXES}


def test_sizes_whose_product_is_the_number_of_ranks_are_accepted() -> None:
    """Whatever axes they use."""
    check_sizes(sizes(dp_shard=4, tp=2), 8)
    check_sizes(sizes(), 1)


@pytest.mark.parametrize(
    ("given", "num_ranks", "text"),
    [
        ({"dp_shard": 3}, 4, "dp_shard = 3 does not fit; set dp_shard = 4"),
        ({"dp_shard": 3, "tp": 2}, 8, "dp_shard = 3 does not fit; set dp_shard = 4"),
        ({}, 2, "set dp_shard = 2, or pp = 2, or dp_replicate = 2, or cp = 2, or tp = 2"),
        ({"dp_shard": 3, "tp": 3}, 4, "no change of one axis makes them equal, so choose sizes whose product is 4"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(given: dict[str, int], num_ranks: int, text: str) -> None:
    """With the values that would fit."""
    with pytest.raises(ConfigError, match=text):
        check_sizes(sizes(**given), num_ranks)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"ep": 2}, r"ep = 2 does not divide the 1 rank of dp_shard = 1 x cp = 1 x tp = 1.*: use one of 1 "),
        ({"dp_shard": 3, "cp": 2, "tp": 2, "ep": 8}, r"the 12 ranks of dp_shard = 3 .*: use one of 1, 2, 3, 4, 6, 12 "),
        ({"pp": 2, "reshard": "always"}, 'reshard = "always" with pp = 2 would gather'),
    ],
)
def test_settings_that_do_not_fit_each_other_are_refused(given: dict[str, Any], text: str) -> None:
    """When the settings are read."""
    with pytest.raises(ValidationError, match=text):
        ParallelSettings.model_validate(given)


def test_learner_without_a_mesh_refuses_settings_of_several_ranks() -> None:
    """Instead of ignoring them."""
    settings = PolicySettings.model_validate({"parallel": {"dp_shard": 2}})
    with pytest.raises(ConfigError, match="asks for 2 ranks, and this policy runs as a single one"):
        Learner(lambda: pytest.fail("no model is needed"), settings)


def test_passes_are_divided_evenly() -> None:
    """Every rank has as many passes as the others, and only the last may be empty."""
    divided = divide_passes([5, 9, 3, 7, 1], 2)
    assert divided == [[1, 2, 4], [3, 0, None]]
    assert divide_passes([], 3) == [[], [], []]
    assert divide_passes([4], 3) == [[0], [None], [None]]
