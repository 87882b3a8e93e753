"""Recorded experts: element types, unrecorded tokens, and joining."""

from __future__ import annotations

import numpy as np
import pytest

from starling.algo.routing import expert_dtype, fill, is_recorded, join_experts, no_experts, routing_bytes, unrecorded
from starling.common.wire.messages import ModelExperts


@pytest.mark.parametrize(("num_experts", "dtype"), [(1, "uint8"), (255, "uint8"), (256, "uint16"), (1 << 15, "uint16")])
def test_ids_leave_one_number_free(num_experts: int, dtype: str) -> None:
    found = expert_dtype(num_experts)
    assert found == dtype
    assert unrecorded(found) > num_experts - 1
    assert routing_bytes(ModelExperts(num_layers=3, num_experts=num_experts, num_chosen=1), 10) == 30 * found.itemsize


def test_experts_of_parts_without_any_are_unrecorded() -> None:
    some = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    assert join_experts([(None, 2), (None, 1)]) is None
    joined = join_experts([(None, 1), (some, 2), (None, 0)])
    assert joined is not None
    assert is_recorded(joined).tolist() == [False, True, True]
    assert joined[1:].tolist() == some.tolist()


def test_only_unrecorded_tokens_are_filled() -> None:
    some = np.arange(12, dtype=np.uint16).reshape(2, 2, 3)
    half = np.concatenate([some[:1] + 100, no_experts(1, some)])
    found = fill(half, some)
    assert found.dtype == np.uint16
    assert found.tolist() == [(some[0] + 100).tolist(), some[1].tolist()]
