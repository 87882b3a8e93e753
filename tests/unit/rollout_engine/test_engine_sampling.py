"""Sampled tokens follow the requested distribution and its support."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from starling.rollout.engine.embedded.sampling import completion_key, draw, sampling_rows, truncate, uniforms

torch.set_num_threads(1)
CPU = torch.device("cpu")
DRAWS = 20_000


def logits_of(seed: int, vocabulary: int = 12) -> torch.Tensor:
    return torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * 1.5


def kept_by(probs: np.ndarray[Any, Any], top_p: float, top_k: int) -> np.ndarray[Any, Any]:
    """Truncate and renormalise one distribution, token by token."""
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    order = order[:top_k] if top_k else order
    total = sum(probs[token] for token in order)
    kept, mass = [], 0.0
    for token in order:
        if top_p < 1.0 and mass >= top_p * total:
            break
        kept.append(token)
        mass += probs[token]
    result = np.zeros(len(probs))
    result[kept] = probs[kept] / probs[kept].sum()
    return result


def draw_many(logits: torch.Tensor, temperature: float, top_p: float, top_k: int) -> Any:
    """Draw `DRAWS` tokens of the same distribution, each with its own uniform."""
    rows = sampling_rows(np.full(DRAWS, temperature), np.full(DRAWS, top_p), np.full(DRAWS, top_k, np.int64), CPU)
    uniform = uniforms(np.full(DRAWS, completion_key(3, 0), np.uint64), np.arange(DRAWS))
    return draw(logits.expand(DRAWS, -1), rows, torch.from_numpy(uniform))


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"),
    [(1.0, 1.0, 0), (0.6, 1.0, 0), (1.0, 0.7, 0), (1.0, 1.0, 4), (1.3, 0.8, 6), (1.0, 0.05, 0), (1.0, 1.0, 1)],
)
def test_draw_frequencies_and_support(temperature: float, top_p: float, top_k: int) -> None:
    logits = logits_of(1)
    tokens, logprobs, *_ = draw_many(logits, temperature, top_p, top_k)
    full = torch.softmax(logits.double() / temperature, dim=-1).numpy()
    expected = kept_by(full, top_p, top_k)
    counts = np.bincount(tokens.numpy(), minlength=len(full))
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(expected))
    support = expected > 0
    expected_counts = expected[support] * DRAWS
    chi_square = float(((counts[support] - expected_counts) ** 2 / expected_counts).sum())
    freedom = int(support.sum()) - 1
    assert chi_square <= freedom + 4 * math.sqrt(2 * max(freedom, 1))
    # The log-probability is that of the whole distribution, truncated or not.
    np.testing.assert_allclose(logprobs.numpy(), np.log(full[tokens.numpy()]), rtol=1e-5, atol=1e-6)


@examples(60)
@given(
    seed=st.integers(0, 10_000),
    vocabulary=st.integers(1, 30),
    top_p=st.floats(0.01, 1.0),
    top_k=st.integers(0, 35),
)
def test_truncate_equals_the_definition_of_top_k_and_top_p(
    seed: int, vocabulary: int, top_p: float, top_k: int
) -> None:
    probs = torch.softmax(logits_of(seed, vocabulary), dim=-1)
    rows = sampling_rows(np.array([1.0]), np.array([top_p]), np.array([top_k]), CPU)
    if rows.truncated is None:
        assert top_p == 1.0
        assert top_k == 0
        return
    assert rows.top_p is not None
    assert rows.top_k is not None
    kept = truncate(probs[None], rows.top_p, rows.top_k)[0].double().numpy()
    np.testing.assert_allclose(kept / kept.sum(), kept_by(probs.double().numpy(), top_p, top_k), atol=1e-6)


def test_truncate_with_ties_keeps_exactly_k() -> None:
    tokens = draw_many(torch.zeros(10), 1.0, 1.0, 3).tokens
    assert sorted(set(tokens.tolist())) == [0, 1, 2]


def test_draw_with_extreme_uniforms_stays_in_the_support() -> None:
    logits = torch.tensor([[-torch.inf, 1.0, 2.0, -torch.inf], [-torch.inf, 1.0, 2.0, -torch.inf]])
    rows = sampling_rows(np.ones(2), np.ones(2), np.zeros(2, np.int64), CPU)
    tokens, logprobs, *_ = draw(logits, rows, torch.tensor([0.0, 1.0 - 2.0**-52], dtype=torch.float64))
    assert tokens.tolist() == [1, 2]
    assert torch.isfinite(logprobs).all()


def test_draw_applies_the_parameters_of_each_row() -> None:
    logits = logits_of(2).repeat(4, 1)
    uniform = torch.full((4,), 0.83, dtype=torch.float64)

    def tokens(temperature: list[float], top_p: list[float], top_k: list[int]) -> list[int]:
        rows = sampling_rows(np.array(temperature), np.array(top_p), np.array(top_k), CPU)
        n = len(temperature)
        return draw(logits[:n], rows, uniform[:n])[0].tolist()

    mixed = tokens([0.0, 1.0, 0.5, 2.0], [1.0, 1.0, 0.6, 1.0], [0, 0, 0, 2])
    settings_of_rows = [(0.0, 1.0, 0), (1.0, 1.0, 0), (0.5, 0.6, 0), (2.0, 1.0, 2)]
    assert mixed == [tokens([t], [p], [k])[0] for t, p, k in settings_of_rows]
    assert mixed[0] == int(logits[0].argmax())


def test_uniforms_are_uniform_and_differ_between_streams() -> None:
    keys = np.array([completion_key(seed, index) for seed in range(50) for index in range(4)], np.uint64)
    assert len(set(keys.tolist())) == len(keys)
    grid = np.stack([uniforms(keys, np.full(len(keys), t)) for t in range(100)])
    assert grid.min() >= 0.0
    assert grid.max() <= 1.0 - 2.0**-52
    counts = np.histogram(grid, bins=50, range=(0, 1))[0]
    expected_counts = grid.size / 50
    assert ((counts - expected_counts) ** 2 / expected_counts).sum() <= 49 + 4 * math.sqrt(2 * 49)
    correlations = np.corrcoef(grid.T)[~np.eye(len(keys), dtype=bool)]
    assert abs(correlations).max() < 0.6
    serial = np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]
    assert abs(serial) < 0.03


def test_uniforms_do_not_depend_on_other_rows() -> None:
    keys = np.array([5, 6, 7], np.uint64)
    together = uniforms(keys, np.array([0, 9, 3]))
    alone = [uniforms(keys[i : i + 1], np.array([t]))[0] for i, t in enumerate((0, 9, 3))]
    assert together.tolist() == alone
