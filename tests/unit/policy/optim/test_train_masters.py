"""Master weights in float32 keep updates that bfloat16 would lose."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.train.model.load import frozen_copy
from starling.policy.train.optim.optimizer import ModelOptimizer

torch.set_num_threads(1)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def linear(dtype: torch.dtype = torch.bfloat16) -> torch.nn.Linear:
    """A layer whose weights are exact in bfloat16, in either type."""
    layer = torch.nn.Linear(8, 8)
    with torch.no_grad():
        layer.weight.copy_(draw(8, 8).bfloat16())
        layer.bias.copy_(draw(8).bfloat16())
    return layer.to(dtype)


def make(model: torch.nn.Module, **changes: object) -> ModelOptimizer:
    settings = OptimizerSettings.model_validate({"learning_rate": 1e-4, "max_grad_norm": 0.0} | changes)
    return ModelOptimizer(model, settings, total_steps=100)


def accumulate(model: torch.nn.Module, seed: int) -> dict[str, Tensor]:
    """Run a backward pass and return its gradients, in the type of the parameters."""
    inputs = draw(5, 8, seed=seed).to(next(model.parameters()).dtype)
    loss = model(inputs).float().square().mean()
    alone = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    torch.autograd.backward(loss)
    return {name: gradient for (name, _), gradient in zip(model.named_parameters(), alone, strict=True)}


def test_masters_accumulate_updates_below_bfloat16_spacing() -> None:
    model, alone = linear(), torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer, plain = make(model), torch.optim.AdamW([alone], lr=1e-4, weight_decay=0.0)
    for _ in range(100):
        optimizer.clear()
        model.weight.grad, alone.grad = torch.ones_like(model.weight), torch.ones_like(alone)
        optimizer.apply(1.0)
        plain.step()
    assert torch.equal(alone, torch.ones_like(alone)), "the spacing below 1 is 1/256, so each update is rounded away"
    master = optimizer.state_tensors()["master:weight"]
    torch.testing.assert_close(master, torch.full((8, 8), 0.99), rtol=1e-5, atol=0.0)
    assert torch.equal(model.weight, master.bfloat16()), "rounded to nearest"


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "muon"])
def test_masters_equal_float32_model_with_same_gradients(kind: str) -> None:
    low, full = linear(), linear(torch.float32)
    changes = {"kind": kind, "learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5, "ema_decay": 0.9}
    descents = make(low, **changes), make(full, **changes)
    for seed in range(5):
        for model, optimizer in zip((low, full), descents, strict=True):
            optimizer.clear()
            for parameter in model.parameters():
                parameter.grad = draw(*parameter.shape, seed=seed).bfloat16().to(parameter.dtype)
        first, second = (optimizer.apply(1.0) for optimizer in descents)
        assert first == second, "the norm, too"
    held, expected = (optimizer.state_tensors() for optimizer in descents)
    expected |= {f"master:{name}": parameter.detach() for name, parameter in full.named_parameters()}
    assert held.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in held.items())


def test_masters_sum_microbatches_in_float32() -> None:
    model = linear()
    optimizer = make(model, learning_rate=1.0)
    sums = {name: torch.zeros(parameter.shape) for name, parameter in model.named_parameters()}
    rounded = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    optimizer.clear()
    for seed in range(6):
        for name, gradient in accumulate(model, seed).items():
            sums[name] += gradient
            rounded[name] += gradient
        assert all(parameter.grad is None for parameter in model.parameters()), "the gradient is freed at once"
    norm = optimizer.apply(1.0).grad_norm
    total = sum(float(gradient.double().square().sum()) for gradient in sums.values()) ** 0.5
    assert norm == pytest.approx(total, rel=1e-6)
    for name, gradient in sums.items():
        held = optimizer.state_tensors()[f"exp_avg:{name}"]
        torch.testing.assert_close(held, 0.1 * gradient, rtol=1e-6, atol=0.0)
    assert any(not torch.equal(rounded[name].float(), gradient) for name, gradient in sums.items())


def test_masters_clip_in_float32() -> None:
    model = linear()
    optimizer = make(model, max_grad_norm=1e-3)
    optimizer.clear()
    gradients = {name: gradient.float() for name, gradient in accumulate(model, 0).items()}
    norm = optimizer.apply(1.0).grad_norm
    assert norm > 1.0
    for name, gradient in gradients.items():
        held = optimizer.state_tensors()[f"exp_avg:{name}"]
        torch.testing.assert_close(held, 0.1 * gradient * 1e-3 / norm, rtol=1e-4, atol=1e-12)


def test_masters_clear_discards_gradients() -> None:
    model = linear()
    optimizer = make(model)
    accumulate(model, 0)
    optimizer.clear()
    accumulate(model, 1)
    once = linear()
    other = make(once)
    accumulate(once, 1)
    assert optimizer.apply(1.0) == other.apply(1.0)
    assert torch.equal(model.weight, once.weight)


@pytest.mark.parametrize("keep", [True, False])
def test_newest_optimizer_receives_the_gradients(keep: bool) -> None:
    model = linear()
    former: ModelOptimizer | None = make(model, learning_rate=0.1)
    accumulate(model, 0)
    optimizer = make(model, learning_rate=0.1)
    if not keep:
        former = None
        gc.collect()
    gradients = accumulate(model, 1)
    optimizer.apply(1.0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(optimizer.state_tensors()[f"exp_avg:{name}"], 0.1 * gradient.float())
    if former is not None:
        assert not former.state_tensors()["exp_avg:weight"].any()


def test_masters_restore_rounds_into_parameters() -> None:
    model, other = linear(), torch.nn.Linear(8, 8).bfloat16()
    optimizer, resumed = make(model, learning_rate=1e-2), make(other)
    accumulate(model, 0)
    optimizer.apply(1.0)
    resumed.load_state_tensors(optimizer.state_tensors())
    assert torch.equal(other.weight, model.weight)


def test_masters_model_copy_keeps_its_own_gradients(tiny: Callable[..., Any]) -> None:
    model = tiny().bfloat16()
    optimizer = make(model)
    reference = frozen_copy(model).requires_grad_(True)
    ids = torch.arange(6)[None]
    torch.autograd.backward(reference(input_ids=ids).logits.float().logsumexp(dim=-1).sum())
    assert all(parameter.grad is not None for parameter in reference.parameters())
    assert optimizer.apply(1.0).grad_norm == 0.0


def test_masters_tied_weights_share_one_master(tiny: Callable[..., Any]) -> None:
    model = tiny(tied=True).bfloat16()
    optimizer = make(model, learning_rate=1e-2)
    ids = torch.arange(6)[None]
    before = model.lm_head.weight.detach().clone()
    torch.autograd.backward(model(input_ids=ids).logits.float().logsumexp(dim=-1).sum())
    optimizer.apply(1.0)
    masters = {name.partition(":")[2] for name in optimizer.state_tensors() if name.startswith("master:")}
    assert masters == {name for name, _ in model.named_parameters()}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not torch.equal(model.lm_head.weight, before)


def test_masters_only_for_parameters_of_fewer_bits() -> None:
    """A frozen model in bfloat16 with an adapter in float32."""
    model = torch.nn.Sequential(linear().requires_grad_(False), linear(torch.float32))
    assert not [name for name in make(model).state_tensors() if name.startswith("master:")]
    model = torch.nn.Sequential(linear(), linear(torch.float32))
    masters = {name for name in make(model).state_tensors() if name.startswith("master:")}
    assert masters == {"master:0.weight", "master:0.bias"}
