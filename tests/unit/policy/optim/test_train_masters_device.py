"""Masters on another device: the results do not depend on the device of the update."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from starling.policy.settings.memory import MemorySettings
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.memory.setup import apply_memory_settings, optimizer_device
from starling.policy.train.model.load import frozen_copy
from starling.policy.train.optim.optimizer import ModelOptimizer
from starling.policy.train.preference import DpoTrainer, RewardModelTrainer
from starling.policy.train.rl import RlTrainer
from starling.policy.train.sft import SftTrainer

torch.set_num_threads(1)

ELSEWHERE = torch.device("cpu")
"""A device with an explicit index is treated as another device, although the memory is the same."""


def make(model: torch.nn.Module, where: torch.device | None = ELSEWHERE, **changes: object) -> ModelOptimizer:
    tree = {"learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5, "ema_decay": 0.9}
    return ModelOptimizer(model, OptimizerSettings.model_validate(tree | changes), 10, device=where)


def backward(model: Any, seed: int) -> None:
    """Add the gradient of a microbatch."""
    ids = torch.randint(31, (1, 12), generator=torch.Generator().manual_seed(seed))
    logits = model(input_ids=ids, use_cache=False).logits.float()
    torch.autograd.backward(logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).mean())


def learn(model: Any, optimizer: ModelOptimizer, steps: range) -> list[Any]:
    """Make steps of three microbatches each."""
    made = []
    for step in steps:
        optimizer.clear()
        for microbatch in range(3):
            backward(model, 3 * step + microbatch)
        made.append(optimizer.apply(1.0))
    return made


def weights(model: Any) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masters_on_other_device_are_bitwise_equal(tiny: Callable[..., Any], kind: str, dtype: torch.dtype) -> None:
    model, other = tiny().to(dtype), tiny().to(dtype)
    before = weights(model)
    optimizer, beside = make(model, kind=kind), make(other, None, kind=kind)
    assert learn(model, optimizer, range(3)) == learn(other, beside, range(3))
    assert_same(weights(model), weights(other))
    assert all(not torch.equal(tensor, before[name]) for name, tensor in weights(model).items())
    assert_same(optimizer.state_tensors(), beside.state_tensors())
    assert_same(dict(optimizer.ema), dict(beside.ema))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("places", [(ELSEWHERE, ELSEWHERE), (ELSEWHERE, None), (None, ELSEWHERE)])
def test_masters_state_resumes_on_other_device(tiny: Callable[..., Any], dtype: torch.dtype, places: Any) -> None:
    model, resumed = tiny().to(dtype), tiny(seed=1).to(dtype)
    optimizer, taking_up = make(model, places[0]), make(resumed, places[1])
    learn(model, optimizer, range(2))
    saved = copy.deepcopy((weights(model), optimizer.state_tensors()))
    learn(model, optimizer, range(2, 4))
    # After its masters were made: they are those of other weights.
    with torch.no_grad():
        for name, parameter in resumed.named_parameters():
            parameter.copy_(saved[0][name])
    taking_up.load_state_tensors(saved[1])
    taking_up.num_steps = 2
    learn(resumed, taking_up, range(2, 4))
    assert_same(weights(resumed), weights(model))
    assert_same(taking_up.state_tensors(), optimizer.state_tensors())


def test_masters_device_moves_and_clears_gradients(tiny: Callable[..., Any]) -> None:
    model, other = tiny(), tiny()
    optimizer, fresh = make(model), make(other)
    backward(model, 7)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert learn(model, optimizer, range(1)) == learn(other, fresh, range(1))
    assert_same(weights(model), weights(other))


def test_masters_device_gathers_assigned_gradients(tiny: Callable[..., Any]) -> None:
    model, other = tiny(), tiny()
    for one, optimizer in ((model, make(model)), (other, make(other, None))):
        for number, parameter in enumerate(one.parameters()):
            parameter.grad = torch.full_like(parameter, 1.0 + number)
        assert optimizer.apply(1.0).grad_norm > 0.0
    assert_same(weights(model), weights(other))


def test_masters_device_skipped_step_changes_nothing(tiny: Callable[..., Any]) -> None:
    model = tiny()
    optimizer, before = make(model), weights(model)
    backward(model, 0)
    assert optimizer.apply(float("nan")).skipped
    assert_same(weights(model), before)
    assert not optimizer.state_tensors()["exp_avg:model.norm.weight"].any()


@pytest.mark.parametrize("where", [ELSEWHERE, None])
def test_newest_optimizer_receives_the_gradients(tiny: Callable[..., Any], where: torch.device | None) -> None:
    model, other = tiny(), tiny()
    former, optimizer, alone = make(model), make(model, where), make(other, where)
    assert learn(model, optimizer, range(1)) == learn(other, alone, range(1))
    assert_same(weights(model), weights(other))
    assert not former.state_tensors()["exp_avg:model.norm.weight"].any()


def test_masters_model_copy_keeps_its_own_gradients(tiny: Callable[..., Any]) -> None:
    model = tiny()
    optimizer = make(model)
    reference = frozen_copy(model).requires_grad_(True)
    backward(reference, 0)
    assert all(parameter.grad is not None for parameter in reference.parameters())
    assert optimizer.apply(1.0).grad_norm == 0.0


def test_offload_optimizer_on_cpu_warns(tiny: Callable[..., Any]) -> None:
    model = tiny()
    settings = MemorySettings(offload_optimizer=True)
    with capture_logs() as logs:
        apply_memory_settings(model, settings)
    assert [entry["event"] for entry in logs] == [
        "policy.memory.offload_optimizer has no effect: the model is on the CPU"
    ]
    assert optimizer_device(model, settings) is None


def test_optimizer_device_of_offloaded_model_is_cpu() -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    assert optimizer_device(model, MemorySettings(offload_optimizer=True)) == torch.device("cpu")
    assert optimizer_device(model, MemorySettings()) is None


@pytest.mark.parametrize("trainer", [SftTrainer, RlTrainer, DpoTrainer, RewardModelTrainer])
def test_every_trainer_uses_the_optimizer_device(tiny: Callable[..., Any], trainer: Any) -> None:
    """A model on the meta device has no values to copy to the CPU, so creating masters there fails."""
    model = tiny().to("meta")
    trainer(model, PolicySettings(), total_steps=1)
    with pytest.raises(NotImplementedError, match="no data"):
        trainer(model, PolicySettings(memory=MemorySettings(offload_optimizer=True)), total_steps=1)
