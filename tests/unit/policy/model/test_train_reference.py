"""The reference model: its version, and that lending it changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from covering import covering
from plain_rl import (
    RAGGED,
    Completion,
    assert_same_gradients,
    double,
    gradients,
    near,
    plain_loss,
)
from states_on_disk import resume, save
from torch import Tensor

from starling.common.errors import ConfigError
from starling.common.settings import LoraSettings
from starling.policy.settings.algorithm import AlgorithmSettings
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.settings.supervised import DpoSettings
from starling.policy.train.data.examples import PreferencePair
from starling.policy.train.learner import Learner
from starling.policy.train.model.load import frozen_copy, version_tensors
from starling.policy.train.model.reference import ReferenceModel
from starling.policy.train.preference import DpoTrainer
from starling.policy.train.rl import RlTrainer
from starling.weightsync.tensors.adapters import add_adapters, is_adapter

torch.set_num_threads(1)

Make = Callable[..., Any]
FORMS = {
    "plain": LoraSettings(rank=4, alpha=6.0),
    "dora": LoraSettings(rank=4, dora=True, targets=r".*\.(q|v|down)_proj"),
    "whole": LoraSettings(rank=2, targets=("v_proj",), modules_to_save=("lm_head", "norm")),
}
KL = 0.4


def settings(*, reset: int = 0, budget: int = 30, **changes: Any) -> PolicySettings:
    optimizer = OptimizerSettings(learning_rate=2e-2, max_grad_norm=0.0)
    algorithm = AlgorithmSettings(name="dapo", kl_coefficient=KL, reference_reset_every=reset)
    return PolicySettings(
        optimizer=optimizer,
        dpo=DpoSettings(optimizer=optimizer),
        algorithm=algorithm.model_copy(update=changes),
        tokens_per_microbatch=budget,
    )


def adapted(model: Any, form: str = "plain", seed: int = 3) -> Any:
    """Add adapters with non-zero values to `model`."""
    add_adapters(model, FORMS[form], seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def copies(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def penalty(one: Completion) -> list[Tensor]:
    return [KL * (torch.exp(known - new) - 1 + new - known) for new, known in zip(one.new, one.reference, strict=True)]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("lora", "reset"), covering([False, True], [0, 1, 2]))
def test_reference_version_follows_setting(tiny: Make, make_groups: Make, lora: bool, reset: int) -> None:
    """Every step against the plain loop, with a copy of the right version as the reference."""
    model = adapted(tiny()) if lora else tiny()
    trainer = RlTrainer(model, settings(reset=reset), total_steps=9)
    versions = {0: double(model)}
    expected = {0: [0, 0, 0, 0, 0], 1: [0, 1, 2, 3, 4], 2: [0, 0, 2, 2, 4]}[reset]
    for step, version in enumerate(expected, start=1):
        plain = double(model)
        groups = near(plain, make_groups(RAGGED, seed=step), 0.2)
        loss = plain_loss("dapo", plain, groups, extra=penalty, reference=versions[version])
        loss.backward()  # type: ignore[no-untyped-call]
        metrics = trainer.step(groups, step=step)
        assert trainer.reference.version == version
        assert (metrics["kl_reference"] > 1e-4) == (version < step - 1)
        assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
        assert_same_gradients(model, plain, 5e-6)  # of a float32 model
        versions[step] = double(model)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("lora", "saved_at"), covering([False, True], [1, 2, 3, 4]))
def test_reference_after_reset_resumes(
    tiny: Make, make_groups: Make, tmp_path: Path, lora: bool, saved_at: int
) -> None:
    def learner() -> Learner:
        chosen = settings(reset=2, num_minibatches=2, num_passes=2, old="proximal")
        return Learner(lambda: adapted(tiny()) if lora else tiny(), chosen)

    def take(one: Learner, first: int, last: int) -> list[dict[str, float]]:
        return [
            one.reinforce(make_groups(RAGGED, seed=step, version=step - 1), step=step, num_steps=9)
            for step in range(first, last + 1)
        ]

    whole = learner()
    take(whole, 1, saved_at)
    save(whole, tmp_path, saved_at)
    metrics = take(whole, saved_at + 1, 6)
    again = learner()
    assert resume(again, tmp_path) == saved_at
    assert take(again, saved_at + 1, 6) == metrics
    assert same(copies(again.model), copies(whole.model))
    assert any(one["kl_reference"] > 1e-4 for one in metrics)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("form", "reset"), covering(FORMS, [0, 2]))
def test_reference_swapped_adapters_equal_separate_copy(tiny: Make, make_groups: Make, form: str, reset: int) -> None:
    """Bitwise, over steps of several updates with proximal log-probabilities."""
    found = []
    for apart in (False, True):
        model = adapted(tiny(tied=False), form)
        reference = frozen_copy(model) if apart else None
        chosen = settings(reset=reset, num_minibatches=2, old="proximal")
        trainer = RlTrainer(model, chosen, total_steps=9, reference=reference)
        metrics = [trainer.step(make_groups(RAGGED, seed=step), step=step) for step in (1, 2, 3, 4)]
        found.append((metrics, gradients(model), copies(model)))
        assert len(trainer.reference.tensors) == len(version_tensors(reference if reference is not None else model))
    (mine, gradient, weights), (theirs, other_gradient, other_weights) = found
    assert mine == theirs
    assert mine[3]["kl_reference"] > 1e-4
    assert same(gradient, other_gradient)
    assert same(weights, other_weights)


@pytest.mark.parametrize("form", FORMS)
def test_reference_computing_keeps_trained_adapters(tiny: Make, form: str) -> None:
    model = adapted(tiny(tied=False), form)
    first = copies(model)
    reference = ReferenceModel(model, None)
    reference.begin(0)
    reference.prepare(1, required_by="a test")
    with torch.no_grad():
        for tensor in version_tensors(model).values():
            tensor.mul_(1.5)
    before, kept = copies(model), {name: tensor.clone() for name, tensor in reference.tensors.items()}
    grads_were_on = [parameter.requires_grad for parameter in model.parameters()]
    with reference.computing() as other:
        assert other is model
        assert same(copies(other), first)
        assert not torch.is_grad_enabled()
    assert same(copies(model), before)
    with pytest.raises(RuntimeError, match="out of memory"), reference.computing():
        raise RuntimeError("out of memory")
    assert same(copies(model), before)
    assert same(dict(reference.tensors), kept)
    assert torch.is_grad_enabled()
    assert [parameter.requires_grad for parameter in model.parameters()] == grads_were_on


@pytest.mark.parametrize("lora", [False, True])
def test_kl_term_added_later_uses_version_0(tiny: Make, make_groups: Make, lora: bool) -> None:
    """It is no longer in memory, but can be loaded again."""

    def load() -> Any:
        return adapted(tiny()) if lora else tiny()

    found = []
    for reference in (None, frozen_copy(load())):
        model = load()
        trainer = RlTrainer(model, settings(kl_coefficient=0.0), total_steps=9, reference=reference, initial=load)
        trainer.step(make_groups(RAGGED, seed=1), step=1)
        if reference is None:
            assert not trainer.reference.tensors
        metrics = trainer.step(make_groups(RAGGED, seed=2), step=2, settings=settings())
        assert metrics["kl_reference"] > 1e-4
        found.append((metrics, copies(model)))
    assert found[0][0] == found[1][0]
    assert same(found[0][1], found[1][1])


def test_unavailable_reference_is_refused(tiny: Make, make_groups: Make) -> None:
    model = tiny()
    trainer = RlTrainer(model, settings(kl_coefficient=0.0), total_steps=9, initial=tiny)
    trainer.step(make_groups(RAGGED, seed=1), step=4)  # begins with version 3, after supervised steps
    before = copies(model)
    with pytest.raises(
        ConfigError,
        match=r"policy.algorithm.kl_coefficient = 0\.4 needs version 3, with which these steps began, as its reference",
    ):
        trainer.step(make_groups(RAGGED, seed=2), step=5, settings=settings())
    assert same(copies(model), before)
    metrics = trainer.step(make_groups(RAGGED, seed=2), step=5, settings=settings(reset=1))
    assert trainer.reference.version == 4
    assert metrics["kl_reference"] == pytest.approx(0.0, abs=1e-6)


def make_pairs(seed: int) -> list[PreferencePair]:
    generator = np.random.default_rng(seed)
    shapes = [(4, 6, 2), (1, 1, 9), (7, 3, 1)]
    return [
        PreferencePair(*(generator.integers(2, 31, size=size).astype(np.int32) for size in shape), prompt_id=str(index))
        for index, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize("form", FORMS)
def test_dpo_of_adapters_equals_separate_reference(tiny: Make, form: str) -> None:
    found = []
    for apart in (False, True):
        model = adapted(tiny(tied=False), form)
        reference = frozen_copy(model) if apart else None
        trainer = DpoTrainer(model, settings(), total_steps=9, reference=reference)
        metrics = [trainer.step(make_pairs(step), step=step) for step in (1, 2, 3)]
        found.append((metrics, gradients(model), copies(model)))
    assert found[0][0] == found[1][0]
    assert found[0][0][0]["reward_margin"] == pytest.approx(0.0, abs=1e-6)
    assert found[0][0][2]["reward_margin"] != pytest.approx(0.0, abs=1e-3)
    assert same(found[0][1], found[1][1])
    assert same(found[0][2], found[1][2])


@pytest.mark.parametrize("saved_at", [1, 2])
def test_dpo_of_adapters_resumes(tiny: Make, tmp_path: Path, saved_at: int) -> None:
    def learner() -> Learner:
        return Learner(lambda: adapted(tiny()), settings())

    def take(one: Learner, first: int, last: int) -> list[dict[str, float]]:
        return [
            one.prefer(make_pairs(step), objective="dpo", step=step, num_steps=9) for step in range(first, last + 1)
        ]

    whole = learner()
    take(whole, 1, saved_at)
    save(whole, tmp_path, saved_at)
    metrics = take(whole, saved_at + 1, 4)
    again = learner()
    assert resume(again, tmp_path) == saved_at
    assert take(again, saved_at + 1, 4) == metrics
    assert same(copies(again.model), copies(whole.model))
