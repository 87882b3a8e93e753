"""Every kind of step on meshes of several axes: distillation, and reinforcement learning with each algorithm."""

from __future__ import annotations

from typing import Any

import pytest
from small_steps import check_mesh

ALGORITHMS = (
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "rloo",
    "rloo_sequence",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "aipo",
    "dual_clip",
    "decoupled_ppo",
)
TOLERANCE = 6e-6
"""As in the steps with tensor parallelism, of four blocks."""


def campaign(*parameters: Any) -> Any:
    """Return parameters of a test that is part of a campaign."""
    return pytest.param(*parameters, marks=pytest.mark.campaign)


@pytest.mark.parametrize(
    ("mesh", "steps"),
    [
        ({"pp": 2, "tp": 2}, [("deep qwen3", "distill"), ("deep qwen3", "rl:gspo")]),
        campaign({"dp_shard": 2}, [("qwen3", "distill")]),
        campaign({"cp": 2}, [("qwen3", "distill")]),
        campaign({"dp_shard": 2, "tp": 2}, [("qwen3", f"rl:{name}") for name in ALGORITHMS]),
        campaign({"pp": 2, "dp_shard": 2}, [("deep qwen3", f"rl:{name}") for name in ALGORITHMS]),
        campaign({"cp": 2}, [("qwen3", f"rl:{name}") for name in ALGORITHMS]),
    ],
    ids=str,
)
def test_every_gradient_is_that_of_a_single_process(mesh: dict[str, Any], steps: list[tuple[str, str]]) -> None:
    """Of losses over tokens, over sequences, and over a teacher's likeliest tokens."""
    check_mesh(mesh, steps, TOLERANCE)
