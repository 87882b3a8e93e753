"""Parameters of tests over several axes: each value of each axis in `make test`, all combinations in the campaign."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def covering(*axes: Iterable[Any]) -> list[Any]:
    """Return all combinations of the values of `axes`, as parameters.

    As many as the longest axis has values are part of `make test`: the first values of all axes, the second ones, and
    so on, where a shorter axis begins anew. The others are marked `campaign`.
    """
    values = [tuple(axis) for axis in axes]
    sample = {tuple(row % len(axis) for axis in values) for row in range(max(map(len, values)))}
    found = []
    for places in itertools.product(*(range(len(axis)) for axis in values)):
        marks = () if places in sample else (pytest.mark.campaign,)
        found.append(pytest.param(*(axis[at] for axis, at in zip(values, places, strict=True)), marks=marks))
    return found
