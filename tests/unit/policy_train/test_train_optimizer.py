"""AdamW against its paper, the schedule, and the bound on the gradient."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError

from starling.common.errors import ConfigError
from starling.policy.settings import GrpoSettings, OptimizerSettings, PolicySettings
from starling.policy.train.optimizer import Descent, learning_rate

torch.set_num_threads(1)


def rates(total: int, **changes: object) -> list[float]:
    settings = OptimizerSettings.model_validate({"learning_rate": 8.0} | changes)
    return [learning_rate(settings, step, total) for step in range(1, total + 1)]


def test_constant_after_a_warm_up_in_equal_parts() -> None:
    assert rates(6, warmup_steps=4) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_linear_falls_in_equal_parts_and_would_reach_zero_after_the_last_step() -> None:
    assert rates(6, warmup_steps=2, schedule="linear") == [4.0, 8.0, 8.0, 6.0, 4.0, 2.0]


def test_cosine_falls_along_half_a_wave() -> None:
    expected = [4.0 * (1.0 + math.cos(math.pi * part / 4)) for part in range(4)]
    assert rates(4, schedule="cosine") == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_steps_beyond_the_last_have_a_rate_that_is_not_negative(schedule: str) -> None:
    settings = OptimizerSettings.model_validate({"schedule": schedule, "warmup_steps": 3})
    assert all(learning_rate(settings, step, 3) >= 0.0 for step in range(1, 20))


def model_with(weight: torch.Tensor, bias: torch.Tensor) -> torch.nn.Linear:
    model = torch.nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        model.weight.copy_(weight)
        model.bias.copy_(bias)
    return model


def test_three_steps_equal_the_algorithm_of_the_paper() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(3, 4, generator=generator), torch.randn(3, generator=generator)
    settings = OptimizerSettings(
        learning_rate=0.1, warmup_steps=2, weight_decay=0.3, betas=(0.8, 0.9), eps=1e-6, max_grad_norm=0.5
    )
    model = model_with(weight, bias)
    descent = Descent(model, settings, total_steps=3)
    values = {"weight": weight.double(), "bias": bias.double()}
    moments = {name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in values.items()}
    for step in (1, 2, 3):
        gradients = {name: torch.randn(value.shape, generator=generator) for name, value in values.items()}
        descent.clear()
        model.weight.grad, model.bias.grad = gradients["weight"].clone(), gradients["bias"].clone()
        applied = descent.apply(1.0)
        norm = math.sqrt(sum(float((gradient.double() ** 2).sum()) for gradient in gradients.values()))
        rate = 0.1 * min(step / 2, 1.0)
        assert applied.grad_norm == pytest.approx(norm, rel=1e-6)
        assert applied.learning_rate == pytest.approx(rate)
        for name, gradient in gradients.items():
            g = gradient.double() * min(1.0, 0.5 / norm)
            first, second = moments[name]
            first, second = 0.8 * first + 0.2 * g, 0.9 * second + 0.1 * g * g
            moments[name] = first, second
            decay = 0.3 if name == "weight" else 0.0
            unbiased = first / (1 - 0.8**step) / ((second / (1 - 0.9**step)).sqrt() + 1e-6)
            values[name] = values[name] * (1 - rate * decay) - rate * unbiased
    torch.testing.assert_close(model.weight.double(), values["weight"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.bias.double(), values["bias"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("gradient", "loss"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan)])
def test_a_gradient_or_loss_that_is_not_finite_is_skipped(gradient: float, loss: float) -> None:
    model = model_with(torch.ones(2, 2), torch.ones(2))
    descent = Descent(model, OptimizerSettings(learning_rate=0.1), total_steps=2)
    model.weight.grad, model.bias.grad = torch.full((2, 2), gradient), torch.ones(2)
    assert descent.apply(loss).skipped
    assert torch.equal(model.weight, torch.ones(2, 2))
    descent.clear()
    model.weight.grad, model.bias.grad = torch.ones(2, 2), torch.ones(2)
    assert not descent.apply(1.0).skipped
    assert torch.isfinite(model.weight).all()
    assert not torch.equal(model.weight, torch.ones(2, 2))


def test_a_frozen_model_and_a_negative_number_of_steps_are_refused() -> None:
    model = model_with(torch.ones(2, 2), torch.ones(2))
    with pytest.raises(ConfigError, match="total_steps is -1"):
        Descent(model, OptimizerSettings(), total_steps=-1)
    with pytest.raises(ConfigError, match="no trainable parameter"):
        Descent(model.requires_grad_(False), OptimizerSettings(), total_steps=1)


@pytest.mark.parametrize(
    "changes",
    [
        {"learning_rate": 0.0},
        {"learning_rate": math.nan},
        {"betas": (0.9, 1.0)},
        {"warmup_steps": -1},
        {"schedule": "wave"},
        {"max_grad_norm": -1.0},
        {"learnign_rate": 1.0},
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(changes))):
        OptimizerSettings.model_validate(changes)


def test_every_setting_has_a_description() -> None:
    for settings in (OptimizerSettings, GrpoSettings, PolicySettings):
        assert all(field.description for field in settings.model_fields.values())
