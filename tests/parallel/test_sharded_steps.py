"""Steps on a mesh of data-parallel ranks: every gradient is that of a single process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from rank_processes import run_ranks
from small_steps import (
    alone,
    assert_close,
    check_mesh,
    make_examples,
    make_groups,
    make_model,
    make_settings,
    make_steps,
)
from torch.distributed.tensor import DTensor

from starling.common.errors import ConfigError
from starling.policy.settings.parallel import ParallelSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.learner import Learner
from starling.policy.train.metrics.step import StepMetrics
from starling.policy.train.parallel.fsdp import end_pass, shard_parameters
from starling.policy.train.parallel.mesh import Mesh

MESHES = {
    "fsdp": {"dp_shard": 2},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "ddp": {"dp_replicate": 2},
}
STEPS = [(name, "rl") for name in ("qwen2", "qwen3", "qwen3-tied", "llama")] + [
    ("qwen3-tied", "sft"),
    ("qwen3", "dpo"),
    ("llama", "reward_model"),
]


@pytest.mark.parametrize(
    ("mesh", "steps"),
    [
        ("fsdp", STEPS),
        ("hsdp", [("qwen3", "rl"), ("qwen3-tied", "sft")]),
        pytest.param("hsdp", STEPS, marks=pytest.mark.campaign),
        pytest.param("ddp", STEPS, marks=pytest.mark.campaign),
    ],
)
def test_every_gradient_is_that_of_a_single_process(mesh: str, steps: list[tuple[str, str]]) -> None:
    """In the first of two steps, and every weight after both; as are norm, loss and other metrics."""
    check_mesh(MESHES[mesh], steps)


def sharded_details(_: int) -> dict[str, Any]:
    """Make steps with other settings, on one of two ranks."""
    mesh = Mesh(ParallelSettings(dp_shard=2))
    found: dict[str, Any] = {}
    for reshard in ("always", "never"):
        found[reshard] = make_steps("qwen3", "rl", {"dp_shard": 2, "reshard": reshard})
    found["checkpointed"] = make_steps("qwen3", "rl", {"dp_shard": 2}, checkpointing=True)
    found["reset"] = make_steps("qwen3", "rl", {"dp_shard": 2}, reference_reset_every=1)
    found["bfloat16"] = make_steps("qwen3", "rl", {"dp_shard": 2}, dtype=torch.bfloat16)
    learner = Learner(lambda: make_model("qwen3", False), make_settings(dp_shard=2), mesh=mesh)
    assert learner.parallel is not None
    metrics = StepMetrics(
        learner.parallel.owned(learner.tensors),
        learner.clock,
        torch.device("cpu"),
        make_settings(),
        learner.parallel.sum_all,
    )
    metrics.begin()
    found["metrics"], _ = metrics.end(1, learner.supervise(make_examples(), num_steps=1))
    found["refused"] = []
    for section in ({"memory": {"compile": True}},):
        settings = PolicySettings.model_validate({"parallel": {"dp_shard": 2}} | section)
        found["refused"].append(_refusal(lambda settings=settings: _first_step(settings, mesh)))
    return found


def _first_step(settings: PolicySettings, mesh: Mesh) -> None:
    Learner(lambda: make_model("qwen3", False), settings, mesh=mesh).reinforce(make_groups(), step=1, num_steps=1)


def _refusal(attempt: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        attempt()
    return str(caught.value)


def test_settings_of_sharding() -> None:
    """Resharding and recomputation change no gradient; bfloat16 computes with float32 parameters and sums.

    A reference that was replaced computes with its new weights: nothing of the old ones stays gathered.
    """
    reset = make_steps("qwen3", "rl", reference_reset_every=1)
    for found in run_ranks(2, sharded_details):
        expected = alone("qwen3", "rl")
        for name in ("always", "never", "checkpointed"):
            assert_close(found[name].gradients, expected.gradients)
            assert_close(found[name].weights, expected.weights)
        assert_close(found["reset"].weights, reset.weights)
        assert found["reset"].metrics == pytest.approx(reset.metrics, rel=2e-5, abs=1e-6)
        assert_close(found["bfloat16"].gradients, expected.gradients, tolerance=0.1)
        assert any((weight != weight.astype(np.float16)).any() for weight in found["bfloat16"].weights.values())
        assert found["metrics"]["update_norm"] == pytest.approx(update_norm_alone(), rel=0.05)  # of other samples
        texts = ("compile",)
        for refusal, text in zip(found["refused"], texts, strict=True):
            assert text in refusal


def freed_weights(_: int) -> dict[str, Any]:
    """Compute without gradients, complete the pass, and change the weights, on one of two ranks."""
    model, ids = make_model("qwen3", False), torch.arange(6)[None]
    shard_parameters(model, Mesh(ParallelSettings(dp_shard=2)))
    with torch.no_grad():
        model(input_ids=ids)
        gathered = {name: one for name, one in model.named_parameters() if not isinstance(one, DTensor)}
        held = {name: one.untyped_storage().nbytes() for name, one in gathered.items()}
        end_pass(model)
        left = sum(one.untyped_storage().nbytes() for one in gathered.values())
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            parameter.to_local().mul_(1.25)
        return {"held": held, "left": left, "logits": model(input_ids=ids).logits.numpy()}


def test_end_of_a_pass_frees_what_it_has_gathered() -> None:
    """Also so that the next pass computes with the weights of an update in between."""
    model = make_model("qwen3", False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
        expected = model(input_ids=torch.arange(6)[None]).logits.numpy()
    for found in run_ranks(2, freed_weights):
        ends = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
        assert ends < found["held"].keys()
        assert all(found["held"].values())
        assert found["left"] == 0
        assert np.allclose(found["logits"], expected, rtol=1e-5, atol=1e-6)


def update_norm_alone() -> float:
    """Return how far a single process moves the weights in one supervised step."""
    learner = Learner(lambda: make_model("qwen3", False), make_settings())
    metrics = StepMetrics(learner.tensors, learner.clock, torch.device("cpu"), make_settings())
    metrics.begin()
    found, _ = metrics.end(1, learner.supervise(make_examples(), num_steps=1))
    return found["update_norm"]
