"""Norm of a gradient whose squares are not finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.train.optim.norm import total_norm
from starling.policy.train.optim.optimizer import ModelOptimizer

torch.set_num_threads(1)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e25, 3e37])
def test_norm_is_that_of_double_precision(scale: float) -> None:
    gradients = [scale * torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in ((7, 3), (5,))]
    expected = torch.cat([one.flatten().double() for one in gradients]).norm()
    assert float(total_norm(gradients)) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_norm_of_what_is_not_finite_is_not_finite(bad: float) -> None:
    assert not total_norm([torch.ones(3), torch.tensor([1.0, bad])]).isfinite()


def updated(scale: float, max_grad_norm: float) -> Any:
    """Return weights after an update by a gradient of `scale`, and whether it was skipped."""
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = ModelOptimizer(model, OptimizerSettings(max_grad_norm=max_grad_norm), 1)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, scale)
    result = optimizer.apply(1.0)
    return torch.cat([parameter.flatten() for parameter in model.parameters()]), result.skipped


def test_gradient_of_any_finite_size_is_clipped() -> None:
    expected, _ = updated(10.0, 1.0)
    found, skipped = updated(1e30, 1.0)
    assert not skipped
    assert torch.allclose(found, expected, rtol=1e-5)
    assert found.abs().min() > 0.0


def test_gradient_whose_moments_would_be_infinite_is_skipped() -> None:
    found, skipped = updated(1e30, 0.0)
    assert skipped
    assert not found.any()
    assert not updated(1e15, 0.0)[1]
