"""Loss mask: an environment's tokens are context of a step only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from plain_rl import (
    ALGORITHMS,
    RAGGED,
    Completion,
    assert_same_gradients,
    by_constant,
    double,
    gradients,
    near,
    plain_loss,
)
from property_tests import examples
from torch import Tensor

from starling.common.errors import ConfigError, WireError
from starling.common.wire.messages import ScoredTrajectory, TensorMeta, TrainGroup
from starling.policy.settings.algorithm import AlgorithmSettings
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.data.groups import ScoredGroup, groups_from_wire
from starling.policy.train.rl import RlTrainer

torch.set_num_threads(1)

Make = Callable[..., Any]
WAYS = [(30, True), (30, False), (10_000, True), (10_000, False)]
MASKS = [
    [[1, 0, 0, 1], [0, 0, 1, 1, 0, 1, 1, 0, 1], [1], []],
    [[0, 0], [], [1, 1, 1, 0, 0, 0, 1], [1, 0, 1, 0, 0]],
    [[1], [0], [1], [1, 1, 1, 0, 1, 1, 0, 0, 0, 0, 1, 1]],
]
"""Of `RAGGED`: an environment that begins, one that ends, and two completions without a sampled token."""
SAMPLED = sum(flag for group in MASKS for mask in group for flag in mask)
LONGEST = max(sum(mask) for group in MASKS for mask in group)


def masked(groups: list[ScoredGroup]) -> list[ScoredGroup]:
    flat = [np.array([flag for mask in group for flag in mask], np.uint8) for group in MASKS]
    return [replace(group, loss_mask=mask) for group, mask in zip(groups, flat, strict=True)]


def settings(algorithm: AlgorithmSettings, budget: int = 10_000, share: bool = True) -> PolicySettings:
    still = OptimizerSettings(learning_rate=1e-12, max_grad_norm=0.0)
    return PolicySettings(optimizer=still, algorithm=algorithm, tokens_per_microbatch=budget, share_prompts=share)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_loss_mask_step_equals_loop_over_sampled_tokens(tiny: Make, make_groups: Make, name: str) -> None:
    plain = double(tiny())
    groups = near(plain, masked(make_groups(RAGGED)), ALGORITHMS[name].noise)
    aggregate = by_constant(LONGEST) if name == "dr_grpo" else None
    expected = plain_loss(name, plain, groups, aggregate=aggregate)
    expected.backward()  # type: ignore[no-untyped-call]
    for budget, share in WAYS:
        model = tiny().double()
        chosen = settings(AlgorithmSettings(name=name), budget, share)
        metrics = RlTrainer(model, chosen, total_steps=1).step(groups, step=1)
        assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-7, rel=1e-6)
        assert metrics["num_tokens"] == SAMPLED
        assert_same_gradients(model, plain, 1e-6)


def test_loss_mask_entropy_and_reference_use_sampled_tokens(tiny: Make, make_groups: Make) -> None:
    plain, other = double(tiny()), double(tiny(seed=1))
    groups = near(plain, masked(make_groups(RAGGED)), 0.2)

    def extra(one: Completion) -> list[Tensor]:
        kl = [torch.exp(known - new) - 1 + new - known for new, known in zip(one.new, one.reference, strict=True)]
        return [0.4 * a - 0.1 * b for a, b in zip(kl, one.entropy, strict=True)]

    expected = plain_loss("dapo", plain, groups, extra=extra, reference=other)
    expected.backward()  # type: ignore[no-untyped-call]
    model = tiny().double()
    chosen = settings(AlgorithmSettings(name="dapo", kl_coefficient=0.4, entropy_coefficient=0.1), 30)
    metrics = RlTrainer(model, chosen, total_steps=1, reference=other).step(groups, step=1)
    assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-7, rel=1e-6)
    assert_same_gradients(model, plain, 1e-6)


def test_loss_mask_ignores_data_of_masked_tokens(tiny: Make, make_groups: Make) -> None:
    groups = near(double(tiny()), masked(make_groups(RAGGED, version=3)), 0.2)
    strange = []
    for group in groups:
        logprobs, versions = group.logprobs.copy(), group.versions.copy()
        logprobs[~group.sampled], versions[~group.sampled] = -40.0, 0
        strange.append(replace(group, logprobs=logprobs, versions=versions))
    chosen = settings(AlgorithmSettings(name="grpo", num_minibatches=2), 30)
    models = tiny(), tiny()
    found, same = (
        RlTrainer(model, chosen, total_steps=1).step(own, step=5)
        for model, own in zip(models, (groups, strange), strict=True)
    )
    assert found == same
    assert found["staleness_max"] == 1.0
    mine, theirs = (gradients(model) for model in models)
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


def test_loss_mask_masked_tokens_are_context(tiny: Make, make_groups: Make) -> None:
    """A different token of the environment changes the gradient."""
    groups = masked(make_groups(RAGGED))
    ids = groups[0].completion_ids.copy()
    ids[1] += 1 if ids[1] == 0 else -1
    assert not groups[0].sampled[1]
    models = tiny(), tiny()
    for model, first in zip(models, (groups[0], replace(groups[0], completion_ids=ids)), strict=True):
        RlTrainer(model, settings(AlgorithmSettings()), total_steps=1).step([first, *groups[1:]], step=1)
    with pytest.raises(AssertionError):
        assert_same_gradients(models[0], models[1], 1e-3)


def test_loss_mask_of_ones_equals_no_mask(tiny: Make, make_groups: Make) -> None:
    groups = make_groups(RAGGED)
    ones = [replace(group, loss_mask=np.ones(len(group.completion_ids), np.uint8)) for group in groups]
    models = tiny(), tiny()
    for model, own in zip(models, (groups, ones), strict=True):
        RlTrainer(model, settings(AlgorithmSettings(), 30), total_steps=1).step(own, step=1)
    mine, theirs = (gradients(model) for model in models)
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


@examples(15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), budget=st.integers(1, 60), share=st.booleans())
def test_loss_mask_is_independent_of_packing(
    tiny: Make, make_groups: Make, data: st.DataObject, budget: int, share: bool
) -> None:
    lengths = st.lists(st.integers(0, 7), min_size=2, max_size=3)
    shapes = data.draw(st.lists(st.tuples(st.integers(1, 6), lengths), min_size=1, max_size=3))
    groups = []
    for group in make_groups(shapes):
        size = len(group.completion_ids)
        flags = data.draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))
        groups.append(replace(group, loss_mask=np.array(flags, np.uint8)))
    if not any(group.sampled.any() for group in groups):
        with pytest.raises(ConfigError, match="without a sampled token"):
            RlTrainer(tiny(), settings(AlgorithmSettings()), total_steps=1).step(groups, step=1)
        return
    plain = double(tiny())
    expected = plain_loss("rloo", plain, groups)
    expected.backward()  # type: ignore[no-untyped-call]
    model = tiny().double()
    chosen = settings(AlgorithmSettings(name="rloo"), budget, share)
    metrics = RlTrainer(model, chosen, total_steps=1).step(groups, step=1)
    assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-7, rel=1e-6)


ARRAYS = (
    np.array([1, 2], np.int32),
    np.array([4, 5, 6], np.int32),
    np.array([-0.1, 0.0, -0.3], np.float32),
    np.array([0, 0, 1], np.int32),
)


def received(mask: npt.NDArray[Any]) -> ScoredGroup:
    arrays = [("", array) for array in ARRAYS] + [("loss_mask", mask)]
    message = TrainGroup(
        prompt_id="train/0/0",
        trajectories=(ScoredTrajectory(num_tokens=3, oldest_version=0, reward=1.0),),
        tensors=tuple(TensorMeta(dtype=a.dtype.name, shape=a.shape, nbytes=a.nbytes, name=n) for n, a in arrays),
    )
    return groups_from_wire([message], [array.tobytes() for _, array in arrays])[0]


def test_groups_from_wire_decodes_loss_mask() -> None:
    group = received(np.array([1, 0, 1], np.uint8))
    assert group.sampled.tolist() == [True, False, True]
    assert group.num_sampled == (2,)


@pytest.mark.parametrize(
    ("mask", "sentence"),
    [
        (np.array([1, 0], np.uint8), r"has 3 tokens and a loss mask uint8\[2\]"),
        (np.array([1, 2, 1], np.uint8), "has 2 in its loss mask: 1 is sampled, 0 is not"),
        (np.array([1, 0, 1], np.int32), r"describes a tensor int32\[3\] in a buffer of 12 bytes; expected one"),
        (np.array([[1, 0, 1]], np.uint8), "expected one dimension of uint8"),
    ],
)
def test_loss_mask_invalid_is_refused(mask: npt.NDArray[Any], sentence: str) -> None:
    with pytest.raises(WireError, match=sentence):
        received(mask)
