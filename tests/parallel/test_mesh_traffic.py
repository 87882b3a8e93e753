"""What a mesh sends for a step, beside its formula: nothing is gathered twice."""

from __future__ import annotations

from typing import Any

import pytest
from mesh_traffic import Sent, step_of_rank
from rank_processes import run_ranks
from small_steps import MODELS, make_model

from starling.policy.plan.sizes import model_sizes
from starling.policy.plan.traffic import Update, traffic_of
from starling.policy.settings.parallel import ParallelSettings

SLACK = 1.05
"""Metrics and sizes of what is sent travel too, and are in no formula; the last shards are smaller than it says."""
MESHES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"dp_shard": 2}),
    ("qwen3-tied", {"dp_shard": 2, "reshard": "never"}),
    ("llama", {"dp_shard": 2, "reshard": "always"}),
    ("qwen2", {"dp_replicate": 2}),
    ("qwen3", {"dp_replicate": 2, "dp_shard": 2}),
    ("qwen3", {"tp": 2}),
    ("qwen3_moe", {"tp": 2}),
    ("qwen2", {"tp": 4}),
    ("qwen3-tied", {"dp_shard": 2, "tp": 2}),
    ("qwen3", {"cp": 2}),
    ("qwen2", {"cp": 2, "context": "all_gather"}),
    ("llama", {"cp": 2, "context": "ring"}),
    ("qwen3", {"dp_shard": 2, "cp": 2}),
]


@pytest.mark.parametrize(("name", "parallel"), MESHES)
def test_mesh_sends_what_the_formula_says(name: str, parallel: dict[str, Any]) -> None:
    kind, tied = MODELS[name]
    config = make_model(kind, tied).config.to_dict()  # imports what the forked ranks then have
    settings = ParallelSettings(**parallel)
    sizes = model_sizes(config)
    for sent in run_ranks(settings.num_ranks, step_of_rank, name, parallel):
        check(sent, sizes, settings)


def check(sent: Sent, sizes: Any, settings: ParallelSettings) -> None:
    """Compare what a rank has sent with the formula, axis by axis."""
    num_tokens = settings.cp * sum(sent.tokens) / len(sent.tokens)
    update = Update(num_passes=len(sent.tokens), num_tokens=num_tokens, item_bytes=4)
    expected = traffic_of(sizes, settings, update)
    assert set(expected) == {axis for axis in ("dp_shard", "dp_replicate", "cp", "tp") if getattr(settings, axis) > 1}
    for axis, traffic in expected.items():
        assert 0.99 <= sent.num_bytes[axis] / traffic.num_bytes <= SLACK, (axis, sent, traffic)
    extra = sum(sent.num_bytes.values()) - sum(sent.num_bytes[axis] for axis in expected)
    assert extra <= (SLACK - 1.0) * sum(sent.num_bytes.values())
