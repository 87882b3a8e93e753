"""EDM sampling: levels, the exponential integrator, and the churn as an action."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from starling.algo.diffusion.edm import churn_factor, churned, clean_at, edm_levels, exponential_step, to_flow
from starling.algo.loss.diffusion import data_term

MEAN, DEVIATION = 0.5, 0.4


def test_levels_are_equally_spaced_in_the_root() -> None:
    levels = edm_levels(10)
    assert levels[0] == pytest.approx(200.0)
    assert levels[-1] == pytest.approx(0.01)
    roots = [level ** (1 / 7) for level in levels]
    assert [b - a for a, b in pairwise(roots)] == pytest.approx([(roots[-1] - roots[0]) / 10] * 10)


@pytest.mark.parametrize(("arguments", "message"), [((0,), "0 steps"), ((4, 0.1, 0.1), "must decrease")])
def test_impossible_levels_are_refused(arguments: tuple[float, ...], message: str) -> None:
    num_steps, *ends = arguments
    options = dict(zip(("largest", "smallest"), ends, strict=False))
    with pytest.raises(ValueError, match=message):
        edm_levels(int(num_steps), **options)


def perfect_clean(state: Tensor, level: Tensor) -> Tensor:
    """Return ``E[x0 | y]`` of normal data."""
    return (DEVIATION**2 * state + level**2 * MEAN) / (DEVIATION**2 + level**2)


def follow(num_steps: int, *, second_order: bool) -> float:
    """Return the error of the end of one trajectory, whose exact one is known for normal data."""
    levels = torch.tensor(edm_levels(num_steps, largest=20.0, smallest=0.05), dtype=torch.float64)[:, None]
    state = start = torch.tensor([[13.0]], dtype=torch.float64)
    before = None
    for level, following in pairwise(levels):
        clean = perfect_clean(state, level)
        state = exponential_step(state, clean, level, following, before)
        before = (clean, level) if second_order else None
    spread = [math.sqrt(DEVIATION**2 + float(level) ** 2) for level in (levels[0], levels[-1])]
    exact = MEAN + (float(start) - MEAN) * spread[1] / spread[0]
    return abs(float(state) - exact)


@pytest.mark.parametrize(("second_order", "order"), [(False, 1.0), (True, 2.0)])
def test_integrator_has_its_order(second_order: bool, order: float) -> None:
    errors = [follow(num_steps, second_order=second_order) for num_steps in (80, 160, 320)]
    for coarse, fine in pairwise(errors):
        assert math.log2(coarse / fine) == pytest.approx(order, abs=0.25)


def test_integrator_is_exact_where_the_clean_sample_is_linear() -> None:
    levels = [torch.tensor([value], dtype=torch.float64) for value in (4.0, 2.0, 0.5)]

    def clean(level: Tensor) -> Tensor:
        return (0.3 - 0.7 * level.log())[:, None]

    def exact(level: Tensor, constant: float) -> Tensor:
        """Of ``dy/dl = 0.3 + 0.7 l - y`` with ``l = -log level``."""
        return clean(level) - 0.7 + constant * level[:, None]

    found = exponential_step(
        exact(levels[1], 1.7), clean(levels[1]), levels[1], levels[2], (clean(levels[0]), levels[0])
    )
    torch.testing.assert_close(found, exact(levels[2], 1.7), rtol=0, atol=1e-12)


def test_flow_model_predicts_the_clean_sample() -> None:
    generator = torch.Generator().manual_seed(0)
    clean, noise = (torch.randn(3, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    level = torch.tensor([0.1, 3.0, 150.0], dtype=torch.float64)
    state = clean + level[:, None] * noise
    flow_state, sigma = to_flow(state, level)
    torch.testing.assert_close(flow_state, (1 - sigma)[:, None] * clean + sigma[:, None] * noise, rtol=0, atol=1e-12)
    torch.testing.assert_close(clean_at(state, noise - clean, level), clean, rtol=0, atol=1e-12)


def test_churn_raises_the_level_to_its_multiple() -> None:
    assert churn_factor(1.0, 10) == pytest.approx(1 / 11)
    assert churn_factor(50.0, 10) == pytest.approx(math.sqrt(1.2) - 1)
    factor, level = churn_factor(1.0, 10), torch.tensor([2.0], dtype=torch.float64)
    found = churned(torch.zeros(1, 3, dtype=torch.float64), level, factor)
    assert float(found.std) == pytest.approx(math.sqrt((2.0 * (1 + factor)) ** 2 - 2.0**2))


def test_data_term_is_that_of_edm_in_terms_of_velocities() -> None:
    generator = torch.Generator().manual_seed(0)
    clean, noise, error = (torch.randn(3, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    level = torch.tensor([0.05, 1.0, 80.0], dtype=torch.float64)
    state = clean + level[:, None] * noise
    velocity = noise - clean + 0.3 * error
    squares = (clean - clean_at(state, velocity, level)).square().mean(dim=1)
    expected = (1 + level**2) / level**2 * squares
    found = data_term(velocity, noise - clean, level / (1 + level))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
