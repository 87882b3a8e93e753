"""The share of each token in the loss of a step."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from starling.algo.algorithm import Aggregate
from starling.algo.loss.aggregate import token_weights

LENGTHS = st.lists(st.integers(0, 50), min_size=1, max_size=12).filter(any)
KINDS = get_args(Aggregate)


def weights(lengths: list[int], kind: Aggregate, constant: int = 7) -> np.ndarray:
    return token_weights(lengths, kind, num_tokens=sum(lengths), num_sequences=len(lengths), constant=constant)


@given(LENGTHS)
def test_weights_of_a_mean_sum_to_one(lengths: list[int]) -> None:
    assert np.dot(weights(lengths, "token_mean"), lengths) == pytest.approx(1.0)
    filled = sum(length > 0 for length in lengths)
    assert np.dot(weights(lengths, "sequence_mean_token_mean"), lengths) == pytest.approx(filled / len(lengths))
    assert np.dot(weights(lengths, "sequence_mean_token_sum"), lengths) == pytest.approx(sum(lengths) / len(lengths))
    assert np.dot(weights(lengths, "constant"), lengths) == pytest.approx(sum(lengths) / len(lengths) / 7)


@given(LENGTHS, st.lists(st.floats(-3.0, 3.0), min_size=12, max_size=12))
def test_weights_equal_the_named_means(lengths: list[int], levels: list[float]) -> None:
    """All tokens of a completion have the same loss."""
    losses = levels[: len(lengths)]
    total = sum(loss * length for loss, length in zip(losses, lengths, strict=True))
    means = sum(loss for loss, length in zip(losses, lengths, strict=True) if length)
    expected = {
        "token_mean": total / sum(lengths),
        "sequence_mean_token_mean": means / len(lengths),
        "sequence_mean_token_sum": total / len(lengths),
        "constant": total / len(lengths) / 7,
    }
    for kind in KINDS:
        step = float(np.sum(weights(lengths, kind) * np.asarray(losses) * np.asarray(lengths)))
        assert step == pytest.approx(expected[kind], abs=1e-9), kind


@given(LENGTHS, st.data())
def test_weights_of_a_part_equal_those_of_the_whole_step(lengths: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(lengths)))
    for kind in KINDS:
        counts = {"num_tokens": sum(lengths), "num_sequences": len(lengths), "constant": 7}
        parts = [token_weights(part, kind, **counts) for part in (lengths[:cut], lengths[cut:])]
        assert np.array_equal(np.concatenate(parts), weights(lengths, kind))


@pytest.mark.parametrize(
    ("kind", "counts", "text"),
    [
        ("token_mean", {"num_tokens": 0, "num_sequences": 1}, "num_tokens is 0"),
        ("sequence_mean_token_mean", {"num_tokens": 1, "num_sequences": 0}, "num_sequences is 0"),
        ("sequence_mean_token_sum", {"num_tokens": 1, "num_sequences": 0}, "num_sequences is 0"),
        ("constant", {"num_tokens": 1, "num_sequences": 1}, "constant is 0"),
        ("mean", {"num_tokens": 1, "num_sequences": 1}, "aggregate is 'mean': give token_mean, "),
    ],
)
def test_counts_out_of_range_are_rejected(kind: Aggregate, counts: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        token_weights([1], kind, **counts)
    with pytest.raises(ValueError, match="completion 1 has -2 tokens"):
        token_weights([1, -2], "token_mean", num_tokens=1, num_sequences=2)
