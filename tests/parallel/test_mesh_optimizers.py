"""Optimizers on a mesh: those that compute from more than one element, and updates on another device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from rank_processes import run_ranks
from small_steps import Variant, check_mesh, make_examples, make_model, make_settings

from starling.common.errors import ConfigError
from starling.policy.settings.memory import MemorySettings
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.settings.parallel import ParallelSettings
from starling.policy.train.learner import Learner
from starling.policy.train.optim.adamw import adamw_8bit, plain_tensors
from starling.policy.train.optim.optimizer import ModelOptimizer
from starling.policy.train.parallel.mesh import Mesh
from starling.policy.train.parallel.weights.shards import local_part
from starling.policy.train.sft import SftTrainer

MUON_TOLERANCE = 2e-5
"""Of weights: small singular values of a gradient, and their rounding, are enlarged up to 480 times."""
QUANTISED_TOLERANCE = 2e-5
"""Of weights: rounding of a gradient may change the code of a moment."""
ELSEWHERE = torch.device("cpu")
"""A device that is given is treated as another one, although the memory is the same."""


def campaign(mesh: dict[str, Any], steps: list[tuple[str, str]]) -> Any:
    """Return parameters of a test that is part of a campaign."""
    return pytest.param(mesh, steps, marks=pytest.mark.campaign)


@pytest.mark.parametrize(
    ("mesh", "steps"),
    [
        ({"dp_shard": 2, "tp": 2}, [("qwen2 by muon", "rl"), ("qwen3_moe by muon", "sft")]),
        campaign({"dp_shard": 2}, [("qwen3-tied by muon", "rl"), ("qwen3_moe by muon", "rl")]),
        campaign({"dp_shard": 3}, [("llama by muon", "rl")]),
        campaign({"dp_replicate": 2, "dp_shard": 2}, [("qwen3-tied by muon", "rl")]),
        campaign({"tp": 4}, [("qwen3 by muon", "rl")]),
        campaign({"cp": 2, "tp": 2}, [("qwen3 by muon", "rl")]),
        campaign({"pp": 2, "dp_shard": 2}, [("deep qwen3 by muon", "rl")]),
        campaign({"dp_shard": 4, "ep": 2}, [("qwen3_moe by muon", "rl")]),
        campaign({"dp_shard": 2, "tp": 2}, [("adapted qwen3 by muon", "rl")]),
    ],
    ids=str,
)
def test_muon_makes_the_updates_of_a_single_process(mesh: dict[str, Any], steps: list[tuple[str, str]]) -> None:
    """Of matrices whose rows, or columns, or both are on several ranks, and of stacks of experts."""
    check_mesh(mesh, steps, 4e-6 if mesh.get("tp") else 2e-6, weights=MUON_TOLERANCE)


@pytest.mark.parametrize(
    ("mesh", "steps"),
    [
        ({"dp_shard": 2}, [("wide qwen3 by adamw_8bit", "rl")]),
        campaign({"dp_replicate": 2, "dp_shard": 2}, [("wide qwen3_moe by adamw_8bit", "rl")]),
        campaign({"cp": 2, "pp": 2}, [("wide qwen2 by adamw_8bit", "sft")]),
        campaign({"dp_shard": 2, "ep": 2}, [("wide qwen3_moe by adamw_8bit", "rl")]),
    ],
    ids=str,
)
def test_adamw_of_8_bits_makes_the_updates_of_a_single_process(
    mesh: dict[str, Any], steps: list[tuple[str, str]]
) -> None:
    """Where shards consist of whole blocks."""
    check_mesh(mesh, steps, weights=QUANTISED_TOLERANCE)


def moments_of(parts: list[torch.Tensor], gradients: list[torch.Tensor], numel: int) -> list[torch.Tensor]:
    """Return the moments of tensors after two updates, each its codes and scales."""
    found = []
    for part, gradient in zip(parts, gradients, strict=True):
        parameter = part.clone()
        groups = [{"params": [parameter], "lr": 0.1, "weight_decay": 0.0}]
        optimizer = adamw_8bit(groups, OptimizerSettings(kind="adamw_8bit"), lambda _: numel)
        for factor in (1.0, -0.3):
            parameter.grad = factor * gradient
            optimizer.step()
        for field in ("exp_avg", "exp_avg_sq"):
            found += [held for _, held in plain_tensors(field, optimizer.state[parameter][field])]
        found.append(parameter)
    return found


def test_parts_of_whole_blocks_have_the_moments_of_the_whole_tensor() -> None:
    """To the bit, also where a part alone would be too small for 8 bits."""
    generator = torch.Generator().manual_seed(0)
    whole, gradient = (torch.randn(32, 128, generator=generator) for _ in range(2))
    expected = moments_of([whole], [gradient], whole.numel())
    found = moments_of(list(whole.chunk(2)), list(gradient.chunk(2)), whole.numel())
    assert expected[0].dtype == torch.uint8
    for number, tensor in enumerate(expected):
        together = torch.cat([found[number], found[number + len(expected)]])
        np.testing.assert_array_equal(together.numpy(), tensor.numpy())


def refusal(_: int, parallel: dict[str, Any], sizes: dict[str, int]) -> str:
    """Return what a rank says of AdamW of 8 bits."""
    mesh = Mesh(ParallelSettings(**parallel))
    learner = Learner(
        lambda: make_model("qwen3", False, **sizes), make_settings(kind="adamw_8bit", **parallel), mesh=mesh
    )
    with pytest.raises(ConfigError) as caught:
        learner.supervise(make_examples(), num_steps=1)
    return str(caught.value)


@pytest.mark.parametrize(
    ("parallel", "sizes", "name"),
    [
        ({"tp": 2}, {"hidden_size": 64, "intermediate_size": 128}, "down_proj"),
        ({"dp_shard": 2}, {"hidden_size": 64, "intermediate_size": 68}, "gate_proj"),
    ],
)
def test_shards_that_cut_blocks_are_refused(parallel: dict[str, Any], sizes: dict[str, int], name: str) -> None:
    """With the tensor."""
    for found in run_ranks(2, refusal, parallel, sizes):
        assert "quantises blocks of 256 numbers, row after row, and policy.parallel cuts model.layers.0" in found
        assert name in found


def offloaded(_: int, parallel: dict[str, Any], name: str, kind: str, dtype: torch.dtype) -> None:
    """Check that steps of a rank do not depend on the device of the updates: to the bit, also undone and resumed."""
    settings = make_settings(kind=kind, **parallel)
    optimizer = settings.sft.optimizer.model_copy(update={"max_grad_norm": 0.05})
    settings = settings.model_copy(update={"sft": settings.sft.model_copy(update={"optimizer": optimizer})})
    mesh, examples = Mesh(settings.parallel), [make_examples(seed=seed) for seed in range(5)]

    def trainer_of(device: torch.device | None) -> SftTrainer:
        learner = Learner(lambda: Variant.of(name).load(dtype=dtype), settings, mesh=mesh)
        assert learner.parallel is not None
        trainer = SftTrainer(learner.model, settings, total_steps=5, parallel=learner.parallel)
        trainer.optimizer = optimizer_of(learner, device)
        trainers[trainer] = learner
        return trainer

    def optimizer_of(learner: Learner, device: torch.device | None) -> ModelOptimizer:
        assert learner.parallel is not None
        names = learner.parallel.whole.names
        return ModelOptimizer(learner.model, optimizer, 5, device=device, shards=learner.parallel.shards, names=names)

    def tensors_of(trainer: SftTrainer) -> dict[str, torch.Tensor]:
        weights = {one: local_part(tensor).clone() for one, tensor in trainers[trainer].model.named_parameters()}
        return weights | {one: local_part(held).clone() for one, held in trainer.optimizer.state_tensors().items()}

    def assert_same() -> None:
        found, expected = tensors_of(moved), tensors_of(beside)
        assert found.keys() == expected.keys()
        assert [one for one, tensor in expected.items() if not torch.equal(found[one], tensor)] == []

    trainers = dict[SftTrainer, Learner]()
    beside, moved = trainer_of(None), trainer_of(ELSEWHERE)
    for number in (0, 1):
        assert moved.step(examples[number], settings) == beside.step(examples[number], settings)
    assert_same()
    assert beside.step(examples[2], settings)["grad_norm"] > 0.05, "it is clipped"
    before = tensors_of(moved)
    moved.optimizer.keep()
    moved.step(examples[3], settings)
    assert any(not torch.equal(tensor, before[one]) for one, tensor in tensors_of(moved).items())
    moved.optimizer.rewind()
    assert all(torch.equal(tensor, before[one]) for one, tensor in tensors_of(moved).items())
    moved.step(examples[2], settings)
    assert_same()

    saved = {one: tensor.clone() for one, tensor in moved.optimizer.state_tensors().items()}
    for trainer, device in ((beside, ELSEWHERE), (moved, None)):
        trainer.optimizer = optimizer_of(trainers[trainer], device)
        trainer.optimizer.load_state_tensors(saved)
        trainer.optimizer.num_steps = 3
    for number in (3, 4):
        assert moved.step(examples[number], settings) == beside.step(examples[number], settings)
        assert_same()


@pytest.mark.parametrize(
    ("parallel", "name", "kind", "dtype"),
    [
        ({"dp_shard": 2}, "qwen3", "adamw", torch.bfloat16),
        ({"tp": 2}, "qwen3", "adamw", torch.bfloat16),
        pytest.param({"dp_shard": 2, "tp": 2}, "qwen3_moe", "adamw", torch.float32, marks=pytest.mark.campaign),
        pytest.param({"pp": 2, "dp_replicate": 2}, "qwen3", "adamw", torch.float32, marks=pytest.mark.campaign),
        pytest.param({"dp_shard": 2}, "wide qwen3", "adamw_8bit", torch.float32, marks=pytest.mark.campaign),
    ],
    ids=str,
)
def test_updates_of_ranks_on_another_device_are_bitwise_equal(
    parallel: dict[str, Any], name: str, kind: str, dtype: torch.dtype
) -> None:
    """Of shards that are their own masters, of masters of parts, and of whole tensors."""
    run_ranks(ParallelSettings(**parallel).num_ranks, offloaded, parallel, name, kind, dtype)


def muon_refusal(_: int) -> str:
    """Return what a rank says of Muon with its updates on another device."""
    settings = make_settings(kind="muon", tp=2).model_copy(update={"memory": MemorySettings(offload_optimizer=True)})
    with pytest.raises(ConfigError) as caught:
        Learner(lambda: make_model("qwen3", False), settings, mesh=Mesh(settings.parallel))
    return str(caught.value)


def test_muon_on_another_device_is_refused() -> None:
    """With the settings to change."""
    for found in run_ranks(2, muon_refusal):
        assert found.startswith('policy.memory.offload_optimizer = true with an optimizer of kind = "muon" is not')
        assert found.endswith('set it to false, or the kind to "adamw"')
