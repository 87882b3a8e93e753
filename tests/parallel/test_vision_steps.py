"""Steps with images and videos on a mesh: every gradient, also of the vision tower, is that of a single process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_steps import TOLERANCE, check_mesh

TP_TOLERANCE = 6e-6
"""Twice that of other meshes, as in the steps with tensor parallelism, and through the tower."""
DOUBLE_TOLERANCE = 1e-6
"""In double precision; log-probabilities are normalised in single precision even there."""


def campaign(mesh: dict[str, Any], *models: str) -> Any:
    """Return parameters of a test that is part of a campaign."""
    return pytest.param(mesh, models, marks=pytest.mark.campaign)


@pytest.mark.parametrize(
    ("mesh", "models"),
    [
        ({"dp_shard": 2}, ("qwen2_5_vl", "qwen3_vl")),
        ({"cp": 2, "tp": 2}, ("qwen3_vl",)),
        campaign({"cp": 2, "tp": 2}, "qwen2_5_vl"),
        ({"pp": 2}, ("deep qwen2_5_vl",)),
        campaign({"dp_replicate": 2}, "qwen2_5_vl", "qwen3_vl"),
        campaign({"dp_replicate": 2, "dp_shard": 2}, "qwen2_5_vl"),
        campaign({"dp_replicate": 2, "dp_shard": 2}, "qwen3_vl_moe"),
        campaign({"tp": 2}, "qwen2_5_vl", "qwen3_vl"),
        campaign({"tp": 2}, "qwen3_vl_moe"),
        campaign({"cp": 2}, "qwen2_5_vl", "qwen3_vl"),
        campaign({"cp": 2, "context": "ring"}, "qwen2_5_vl", "qwen3_vl"),
        campaign({"dp_shard": 2, "tp": 2}, "qwen2_5_vl", "qwen3_vl"),
        campaign({"dp_shard": 2, "ep": 2}, "qwen3_vl_moe"),
        campaign({"pp": 2, "dp_shard": 2}, "deep qwen2_5_vl", "deep qwen3_vl"),
        campaign({"pp": 2, "tp": 2}, "deep qwen2_5_vl", "deep qwen3_vl"),
        campaign({"pp": 2, "cp": 2}, "deep qwen2_5_vl", "deep qwen3_vl"),
        campaign({"pp": 2, "dp_shard": 2, "schedule": "zbv"}, "deep qwen2_5_vl"),
    ],
    ids=str,
)
def test_every_gradient_is_that_of_a_single_process(mesh: dict[str, Any], models: tuple[str, ...]) -> None:
    """With prompts with and without images, whose placeholders are on several ranks, and positions of three axes."""
    steps = [(model, "images") for model in models]
    if "qwen3_vl_moe" in models:  # rounding may send a token to another expert in the second step
        check_mesh(mesh, steps, DOUBLE_TOLERANCE, torch.float64)
    else:
        check_mesh(mesh, steps, TP_TOLERANCE if mesh.get("tp") else TOLERANCE)
