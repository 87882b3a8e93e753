"""Steps with context parallelism: those of a single process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_processes import run_ranks
from small_steps import VOCABULARY, check_mesh, make_model, make_settings

from starling.common.errors import ConfigError
from starling.policy.settings.parallel import ParallelSettings
from starling.policy.train.learner import Learner
from starling.policy.train.parallel.mesh import Mesh

LANGUAGE = [
    ("qwen2", "trees"),
    ("qwen3-tied", "rl"),
    ("qwen3_moe", "rl"),
    ("llama", "sft"),
    ("qwen3", "dpo"),
]
SPECIAL = [("gemma2", "trees"), ("gpt_oss", "trees")]
"""Models with sliding windows, soft caps and sinks."""
MESHES: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "cp": (
        {"cp": 2},
        [("qwen2", "trees"), ("qwen3_moe", "rl"), *SPECIAL],
    ),
    "gathered keys": ({"cp": 2, "context": "all_gather"}, [("qwen3", "dpo")]),
    "ring": ({"cp": 2, "context": "ring"}, [("gemma2", "trees"), ("llama", "reward_model")]),
}
OTHERS: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "further steps": ({"cp": 2}, [("qwen3", "dpo"), ("llama", "reward_model")]),
    "further gathered keys": ({"cp": 2, "context": "all_gather"}, [("gemma2", "trees")]),
    "further ring": ({"cp": 2, "context": "ring"}, [("qwen2", "trees")]),
    "fsdp, cp and tp": ({"dp_shard": 2, "cp": 2, "tp": 2}, [("qwen3", "trees")]),
    "four ranks for two key heads": ({"cp": 4}, [*LANGUAGE, ("gemma2", "trees")]),
    "gathered keys of four ranks": ({"cp": 4, "context": "all_gather"}, [*LANGUAGE, ("gemma2", "trees")]),
    "ring of four ranks": ({"cp": 4, "context": "ring"}, [*LANGUAGE, ("gemma2", "trees")]),
    "ring of three ranks": ({"cp": 3, "context": "ring"}, [("llama", "trees"), ("qwen3", "rl")]),
    "fsdp and cp": ({"dp_shard": 2, "cp": 2}, [*LANGUAGE, ("llama", "reward_model")]),
    "cp and tp": ({"cp": 2, "tp": 2}, [("qwen2", "trees"), ("qwen3", "dpo")]),
    "hsdp and ring": ({"dp_replicate": 2, "cp": 2, "context": "ring"}, LANGUAGE),
    "cp and ep": ({"cp": 2, "ep": 2}, [("qwen3_moe", "rl"), ("qwen3_moe", "sft")]),
    "pp and cp": ({"pp": 2, "cp": 2}, [("qwen3", "trees"), ("qwen3", "dpo")]),
    "pp, ring and ep": ({"pp": 2, "cp": 2, "context": "ring", "ep": 2}, [("qwen3_moe", "rl")]),
    "all data axes and cp": ({"dp_replicate": 2, "dp_shard": 2, "cp": 2}, [("qwen3", "trees")]),
    "fsdp, ring and tp": ({"dp_shard": 2, "cp": 2, "tp": 2, "context": "ring"}, [("qwen3", "trees"), ("llama", "dpo")]),
}
TOLERANCE = 3e-6
"""The gradients of biases of keys are small differences of large numbers: which kernels a processor has decides about
the last digits of a single process, too. In double precision all are within 1e-9."""


def check(mesh: str) -> None:
    """Compare the steps of a mesh with those of a single process."""
    parallel, steps = (MESHES | OTHERS)[mesh]
    check_mesh(parallel, steps, TOLERANCE)


@pytest.mark.parametrize("mesh", MESHES)
def test_every_gradient_is_that_of_a_single_process(mesh: str) -> None:
    """With packed documents and trees of odd lengths, whose tokens are on several ranks."""
    check(mesh)


@pytest.mark.parametrize("context", [pytest.param("all_gather", marks=pytest.mark.campaign), "ring"])
def test_every_gradient_in_double_precision_is_that_of_a_single_process(context: str) -> None:
    """Of sinks and biases of keys too, which are small differences of large numbers."""
    check_mesh({"cp": 2, "context": context}, [("gpt_oss", "trees"), ("qwen2", "rl")], 1e-9, torch.float64)


@pytest.mark.campaign
@pytest.mark.parametrize("mesh", OTHERS)
def test_every_gradient_of_other_meshes_is_that_of_a_single_process(mesh: str) -> None:
    """More ranks, more axes, and more steps."""
    check(mesh)


def refusal(_: int, kind: str, parallel: dict[str, Any]) -> str:
    """Return what a rank says of a model."""
    from transformers import MambaConfig, MambaForCausalLM

    def load() -> Any:
        if kind == "mamba":
            return MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1))
        return make_model(kind, False)

    with pytest.raises(ConfigError) as caught:
        Learner(load, make_settings(**parallel), mesh=Mesh(ParallelSettings(**parallel)))
    return str(caught.value)


def test_heads_that_ranks_cannot_divide_are_refused() -> None:
    """With the numbers that can, and the methods that need not."""
    for found in run_ranks(3, refusal, "qwen3", {"cp": 3}):
        assert found == (
            "policy.parallel.cp = 3 does not divide the 4 attention heads: set it to one of 1, 2, 4, or "
            'policy.parallel.context to "ring" or "all_gather"'
        )


def test_models_that_carry_a_state_are_refused() -> None:
    """With the reason, which names what the model has."""
    for found in run_ranks(2, refusal, "mamba", {"cp": 2}):
        assert "policy.parallel.cp = 2 needs a model that attends by segments" in found
        assert "linear_attention" in found
