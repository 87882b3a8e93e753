"""AdamW against its paper, gradient clipping, and differences between parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from starling.common.errors import ConfigError
from starling.common.setting_docs import setting_texts
from starling.policy.settings.algorithm import AlgorithmSettings
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.optim.optimizer import ModelOptimizer

torch.set_num_threads(1)


def model_with(weight: torch.Tensor, bias: torch.Tensor) -> torch.nn.Linear:
    model = torch.nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        model.weight.copy_(weight)
        model.bias.copy_(bias)
    return model


def test_adamw_equals_the_paper() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(3, 4, generator=generator), torch.randn(3, generator=generator)
    settings = OptimizerSettings(
        learning_rate=0.1, warmup_steps=2, weight_decay=0.3, betas=(0.8, 0.9), eps=1e-6, max_grad_norm=0.5
    )
    model = model_with(weight, bias)
    optimizer = ModelOptimizer(model, settings, total_steps=3)
    values = {"weight": weight.double(), "bias": bias.double()}
    moments = {name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in values.items()}
    for step in (1, 2, 3):
        gradients = {name: torch.randn(value.shape, generator=generator) for name, value in values.items()}
        optimizer.clear()
        model.weight.grad, model.bias.grad = gradients["weight"].clone(), gradients["bias"].clone()
        applied = optimizer.apply(1.0)
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
def test_optimizer_skips_non_finite_gradient_or_loss(gradient: float, loss: float) -> None:
    model = model_with(torch.ones(2, 2), torch.ones(2))
    optimizer = ModelOptimizer(model, OptimizerSettings(learning_rate=0.1), total_steps=2)
    model.weight.grad, model.bias.grad = torch.full((2, 2), gradient), torch.ones(2)
    assert optimizer.apply(loss).skipped
    assert torch.equal(model.weight, torch.ones(2, 2))
    optimizer.clear()
    model.weight.grad, model.bias.grad = torch.ones(2, 2), torch.ones(2)
    assert not optimizer.apply(1.0).skipped
    assert torch.isfinite(model.weight).all()
    assert not torch.equal(model.weight, torch.ones(2, 2))


def test_optimizer_refuses_frozen_model_and_negative_steps() -> None:
    model = model_with(torch.ones(2, 2), torch.ones(2))
    with pytest.raises(ConfigError, match="total_steps is -1"):
        ModelOptimizer(model, OptimizerSettings(), total_steps=-1)
    with pytest.raises(ConfigError, match="no trainable parameter"):
        ModelOptimizer(model.requires_grad_(False), OptimizerSettings(), total_steps=1)


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
        {"kind": "sgd"},
        {"rates": {"bias": 0.0}},
        {"rates": {"bias": math.inf}},
        {"rates": {"(": 1.0}},
        {"no_decay": ["["]},
        {"schedule": "wsd"},
        {"decay_steps": 3},
        {"final_share": 1.5},
        {"ema_decay": 1.0},
        {"momentum": 1.0},
    ],
)
def test_optimizer_settings_out_of_range_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(changes))):
        OptimizerSettings.model_validate(changes)


def test_optimizer_settings_have_descriptions() -> None:
    for settings in (OptimizerSettings, AlgorithmSettings, PolicySettings):
        assert all(setting_texts(settings).values())


KINDS = ("adamw", "adamw_8bit", "muon")
DTYPES = (torch.float32, torch.bfloat16)


def network(dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    """Two equal matrices, large enough for moments of 8 bits, and vectors."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        layers = torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64)
    return torch.nn.Sequential(*layers).to(dtype)


def give_gradients(model: torch.nn.Module, seed: int) -> None:
    """Set random gradients for all trainable parameters, equal for parameters of equal shape."""
    for parameter in model.parameters():
        generator = torch.Generator().manual_seed(seed)
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = gradient if parameter.requires_grad else None


def make(model: torch.nn.Module, total_steps: int = 9, **changes: object) -> ModelOptimizer:
    settings = OptimizerSettings.model_validate({"learning_rate": 1e-2, "weight_decay": 0.1} | changes)
    return ModelOptimizer(model, settings, total_steps)


def update(optimizer: ModelOptimizer, model: torch.nn.Module, seed: int) -> None:
    optimizer.clear()
    give_gradients(model, seed)
    assert not optimizer.apply(1.0).skipped


def copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_kinds_fit_a_regression(kind: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(128, 64, generator=generator).to(dtype)
    targets = inputs @ torch.randn(64, 64, generator=generator).to(dtype) / 16.0
    model = network(dtype)
    # An update of Muon is about a fifth as long as one of the first of AdamW.
    rate = 4e-2 if kind == "muon" else 1e-2
    optimizer = make(model, 40, kind=kind, learning_rate=rate, weight_decay=0.0, schedule="linear")
    losses = []
    for _ in range(40):
        optimizer.clear()
        loss = torch.nn.functional.mse_loss(model(inputs).float(), targets.float())
        torch.autograd.backward(loss)
        losses.append(float(loss.detach()))
        optimizer.apply(losses[-1])
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_state_tensors_resume_bitwise(kind: str, dtype: torch.dtype) -> None:
    changes = {"kind": kind, "ema_decay": 0.9, "schedule": "wsd", "decay_steps": 3}
    whole = network(dtype)
    optimizer = make(whole, 6, **changes)
    for seed in range(3):
        update(optimizer, whole, seed)
    weights, saved = copies(whole.state_dict()), copies(optimizer.state_tensors())
    for seed in range(3, 6):
        update(optimizer, whole, seed)
    again = network(dtype)
    resumed = make(again, 6, **changes)
    again.load_state_dict(weights)
    resumed.load_state_tensors(saved)
    resumed.num_steps = 3
    assert same(resumed.state_tensors(), saved)
    for seed in range(3, 6):
        update(resumed, again, seed)
    assert same(again.state_dict(), whole.state_dict())
    assert same(resumed.state_tensors(), optimizer.state_tensors())
    assert not same(resumed.state_tensors(), saved)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_before", [0, 1])
def test_optimizer_skipped_step_changes_nothing(kind: str, dtype: torch.dtype, num_before: int) -> None:
    model = network(dtype)
    optimizer = make(model, kind=kind, ema_decay=0.9)
    for seed in range(num_before):
        update(optimizer, model, seed)
    weights, state = copies(model.state_dict()), copies(optimizer.state_tensors())
    optimizer.clear()
    give_gradients(model, 7)
    parameter = next(model.parameters())
    assert parameter.grad is not None
    parameter.grad[3, 4] = math.nan
    assert optimizer.apply(1.0).skipped
    assert same(model.state_dict(), weights)
    assert same(optimizer.state_tensors(), state)
    assert optimizer.num_steps == num_before + 1, "the schedule counts the steps of the run"


@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_ignores_frozen_parameters(kind: str) -> None:
    model = network(torch.bfloat16)
    model[0].requires_grad_(False)
    frozen = copies(model[0].state_dict())
    optimizer = make(model, kind=kind, ema_decay=0.9)
    update(optimizer, model, 0)
    assert same(model[0].state_dict(), frozen)
    assert {name.partition(":")[2] for name in optimizer.state_tensors()} == {"2.weight", "2.bias"}
    assert optimizer.ema.keys() == {"2.weight", "2.bias"}


@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_rate_factor_scales_the_update(kind: str) -> None:
    model = network()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = make(model, kind=kind, rates={r"^2\.weight": 0.25, r"2\.": 0.5})
    for seed in range(3):
        update(optimizer, model, seed)
    assert model[0].weight.abs().min() > 0.0
    assert torch.equal(model[2].bias, 0.5 * model[0].bias)
    assert optimizer.apply(1.0).learning_rate == 1e-2
    if kind == "muon":
        torch.testing.assert_close(model[2].weight, 0.25 * model[0].weight)


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
def test_adamw_first_update_is_rate_times_sign(kind: str) -> None:
    model = network()
    before = copies(model.state_dict())
    update(make(model, kind=kind, weight_decay=0.0, max_grad_norm=0.0, rates={"2.weight": 0.25}), model, 0)
    assert model[0].weight.grad is not None
    signs = model[0].weight.grad.sign()
    for name, factor in (("0.weight", 1.0), ("2.weight", 0.25)):
        change = model.state_dict()[name] - before[name]
        torch.testing.assert_close(change, -1e-2 * factor * signs, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("setting", ["rates", "no_decay"])
def test_optimizer_unmatched_pattern_lists_similar_names(tiny: Callable[..., Any], setting: str) -> None:
    value: object = {"attn.q_prj": 0.5} if setting == "rates" else ["attn.q_prj"]
    with pytest.raises(
        ConfigError, match=rf"optimizer.{setting} has 'attn.q_prj', .*: model.layers.0.self_attn.q_proj"
    ):
        make(tiny(), **{setting: value})
    with pytest.raises(ConfigError, match=r"matches no trainable parameter; the first of 4 is 0\.weight"):
        make(network(), rates={"µµµ": 0.5})
    frozen = network()
    frozen[2].requires_grad_(False)
    with pytest.raises(ConfigError, match="matches no trainable parameter"):
        make(frozen, no_decay=["^2"])


def test_optimizer_shadowed_pattern_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'2\.bias' after patterns that match everything it matches"):
        make(network(), rates={"2": 0.5, "2.bias": 0.25})


@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_does_not_decay_vectors_and_no_decay_patterns(kind: str) -> None:
    model = network()
    before = copies(model.state_dict())
    optimizer = make(model, kind=kind, learning_rate=0.5, no_decay=[r"^2\.", "2.weight"])
    optimizer.clear()
    optimizer.apply(0.0)
    assert same(model[2].state_dict(), network()[2].state_dict())
    assert torch.equal(model[0].bias, before["0.bias"])
    torch.testing.assert_close(model[0].weight, before["0.weight"] * (1.0 - 0.5 * 0.1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_optimizer_ema_averages_every_update(dtype: torch.dtype) -> None:
    model = network(dtype)
    optimizer = make(model, ema_decay=0.75)
    expected = {name: tensor.double() for name, tensor in model.state_dict().items()}
    for seed in range(4):
        update(optimizer, model, seed)
        held = optimizer.state_tensors()
        for name, tensor in model.named_parameters():
            weight = held.get(f"master:{name}", tensor.detach()).double()
            expected[name] = 0.75 * expected[name] + 0.25 * weight
    for name, tensor in optimizer.ema.items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-6, atol=1e-7)
    assert not make(model).ema


def test_adamw_8bit_uses_a_quarter_and_stays_close() -> None:
    ends = {}
    for kind in ("adamw", "adamw_8bit"):
        model = network()
        optimizer = make(model, kind=kind)
        for seed in range(12):
            update(optimizer, model, seed)
        ends[kind] = copies(model.state_dict())
        held = optimizer.state_tensors()
    assert held["exp_avg.codes:0.weight"].dtype == torch.uint8
    assert held["exp_avg_sq.scale:0.weight"].shape == (64 * 64 // 256,)
    assert held["exp_avg:0.bias"].dtype == torch.float32, "too small to be worth it"
    start = network().state_dict()
    for name, exact in ends["adamw"].items():
        change, difference = exact - start[name], ends["adamw_8bit"][name] - exact
        assert difference.norm() < 0.1 * change.norm()


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"kind": "muon"}, "it has exp_avg:0.weight, which this optimizer does not have"),
        ({"kind": "adamw_8bit"}, "it has no exp_avg.codes:0.weight, which this optimizer has"),
        ({"ema_decay": 0.9}, "it has no ema:0.bias, which this optimizer has"),
    ],
)
def test_optimizer_state_of_other_kind_is_refused(changes: dict[str, object], difference: str) -> None:
    model, other = network(), network()
    given, optimizer = make(model), make(other, **changes)
    update(given, model, 0)
    before = copies(optimizer.state_tensors())
    with pytest.raises(ConfigError, match=f"{difference}; use the optimizer settings and the model of that run"):
        optimizer.load_state_tensors(given.state_tensors())
    assert same(optimizer.state_tensors(), before)


def test_optimizer_state_of_other_shape_is_refused() -> None:
    given = make(torch.nn.Linear(4, 2)).state_tensors()
    with pytest.raises(ConfigError, match=r"exp_avg:weight is torch.float32 \[2, 4\], and this one's is .* \[2, 3\]"):
        make(torch.nn.Linear(3, 2)).load_state_tensors(given)
