"""Steps that replay routing on a mesh: every gradient is that of a single process, as is the share of other choices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_processes import run_ranks
from small_steps import alone, assert_close, check_mesh, make_steps

from starling.policy.settings.parallel import ParallelSettings

TP_TOLERANCE = 4e-6
"""As in the steps with tensor parallelism."""
STEPS = [("qwen3_moe", "replay")]
OTHERS = [("deepseek_v3", "replay"), ("gpt_oss", "replay")]
RANKS: list[dict[str, Any]] = [
    {"dp_shard": 2, "ep": 2},
    {"tp": 2},
    {"cp": 2},
    {"tp": 2, "cp": 2, "ep": 4},
    {"cp": 2, "context": "ring"},
    {"dp_replicate": 2},
]
STAGES: list[dict[str, Any]] = [
    {"pp": 2, "schedule": "1f1b"},
    {"pp": 2, "tp": 2, "schedule": "gpipe"},
]


@pytest.mark.parametrize(
    "mesh", [*RANKS[:3], STAGES[0], *(pytest.param(one, marks=pytest.mark.campaign) for one in (*RANKS[3:], STAGES[1]))]
)
def test_every_gradient_is_that_of_a_single_process(mesh: dict[str, Any]) -> None:
    """With prompts that several completions share, a prompt whose experts are unrecorded, and a reference."""
    expected = alone(*STEPS[0]).metrics["router_replay_share"]
    assert 0.2 < expected < 0.8
    check_mesh(mesh, STEPS, TP_TOLERANCE)


@pytest.mark.campaign
@pytest.mark.parametrize("mesh", [{"dp_shard": 2, "ep": 2}, {"tp": 2, "ep": 2}, {"cp": 2}])
def test_other_families_have_every_gradient_of_a_single_process(mesh: dict[str, Any]) -> None:
    check_mesh(mesh, OTHERS, 1e-6, torch.float64)


@pytest.mark.campaign
@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_stages_of_one_rank_count_their_own_layers(schedule: str) -> None:
    check_mesh({"pp": 2, "schedule": schedule}, [("deep qwen3_moe", "replay")], TP_TOLERANCE)


@pytest.mark.campaign
@pytest.mark.parametrize("model", ["attention-adapted qwen3_moe", "adapted qwen3_moe"])
def test_adapters_replay_too(model: str) -> None:
    """Those of the attention, and those of experts and routers, which wrap them."""
    check_mesh({"dp_shard": 2}, [(model, "replay")], TP_TOLERANCE)


def recomputed(_: int) -> Any:
    return make_steps("deep qwen3_moe", "replay", {"pp": 2, "schedule": "1f1b"}, checkpointing=True)


def test_stages_recompute_each_microbatch_with_its_own_experts() -> None:
    """Other microbatches are computed between the forward and the backward pass of one."""
    expected = alone("deep qwen3_moe", "replay")
    for outcome in run_ranks(ParallelSettings(pp=2).num_ranks, recomputed):
        own = {name: one for name, one in expected.gradients.items() if name in outcome.gradients}
        assert_close(outcome.gradients, own, TP_TOLERANCE)
        share = expected.metrics["router_replay_share"]
        assert outcome.metrics["router_replay_share"] == pytest.approx(share, rel=1e-6)
