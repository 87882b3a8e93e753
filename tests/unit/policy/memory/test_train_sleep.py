"""Sleep and wake of a policy: its tensors and all later steps are bitwise unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from starling.policy.settings.policy import PolicySettings
from starling.policy.train.learner import Learner
from starling.policy.train.memory.offload import DeviceOffload

Make = Callable[..., Any]


def test_offload_restores_views_and_shared_memory() -> None:
    whole = torch.arange(12, dtype=torch.float32)
    rows, tied = whole.view(3, 4), whole[4:8]
    kept = rows.clone()
    offload = DeviceOffload(("cpu",))
    assert offload.offload([whole, rows, tied, torch.empty(0)]) == 48, "three tensors share one storage"
    assert whole.untyped_storage().nbytes() == 0
    assert offload.offload([whole]) == 0
    offload.restore()
    assert torch.equal(rows, kept)
    rows[1, 0] = -1.0
    assert tied[0] == whole[4] == -1.0
    assert not offload.is_offloaded


def test_offload_leaves_host_tensors() -> None:
    tensor = torch.ones(4)
    assert DeviceOffload().offload([tensor]) == 0
    assert torch.equal(tensor, torch.ones(4))


@pytest.mark.parametrize("kl_coefficient", [0.0, 0.1], ids=["plain", "with a reference"])
def test_learner_that_slept_makes_the_same_versions(tiny: Make, make_groups: Make, kl_coefficient: float) -> None:
    algorithm = PolicySettings().algorithm.model_copy(update={"kl_coefficient": kl_coefficient})
    settings = PolicySettings(algorithm=algorithm)
    steady, sleeper = Learner(tiny, settings), Learner(tiny, settings)
    sleeper._offload = DeviceOffload(("cpu",))  # let the CPU's memory stand for a device's
    for step in (1, 2, 3):
        for learner in (steady, sleeper):
            learner.reinforce(make_groups([(6, [4, 1]), (3, [2, 5])], seed=step), step=step, num_steps=3)
        num_bytes = sum(tensor.nbytes for tensor in sleeper.tensors.values())
        assert sleeper.sleep() > 2 * num_bytes, "the optimizer's moments are offloaded, too"
        assert sleeper.asleep
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in sleeper.tensors.values())
        sleeper.wake()
        assert not sleeper.asleep
        assert all(torch.equal(tensor, steady.tensors[name]) for name, tensor in sleeper.tensors.items())
