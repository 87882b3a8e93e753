"""Warm start: the settings that it adds to a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from starling.cli.recipe.schema import Recipe
from starling.cli.recipe.warm_start import start_from_state
from starling.common.ids import TrainerKind
from starling.policy.train.checkpoint.header import TrainerState
from starling.policy.train.checkpoint.state import HostBuffers, StateMetadata, StateStore, take_state
from starling.policy.train.checkpoint.storage import Storage

MODEL = {"path": "somewhere"}


def recipe(kind: str, **sections: Any) -> Recipe:
    tree = {"run": {"kind": kind}, "model": MODEL, "data": {"source": "rows.jsonl"}, **sections}
    return Recipe.model_validate(tree)


def state(folder: Path, version: int, trainer: TrainerState) -> str:
    """Write a state without weights, and return its path."""
    progress = StateMetadata(run="r", version=version, trainer=trainer)
    return StateStore(Storage(str(folder))).write(take_state(progress, {}, torch.device("cpu"), HostBuffers()))


def supervised(num_steps: int) -> TrainerState:
    return TrainerState(kind="sft", num_steps=num_steps, total_steps=3)


REINFORCED = TrainerState(kind="rl", num_steps=1, total_steps=4, begun_at=3)
SCORED = {"reward": {"scorers": [{"name": "exact_match"}]}, "sft": {"num_steps": 3}}


@pytest.mark.parametrize(
    ("version", "trainer", "next_kind"),
    [(2, supervised(2), "sft"), (3, supervised(3), "rl"), (4, REINFORCED, "rl")],
)
def test_kind_of_the_first_step_follows_from_the_state(
    tmp_path: Path, version: int, trainer: TrainerState, next_kind: TrainerKind
) -> None:
    path = state(tmp_path, version, trainer)
    begun = start_from_state(recipe("rl", **SCORED), path)
    assert begun.policy.saving.begin_from == path
    assert begun.policy.saving.begin_kind == next_kind
    assert begun.controller.begin_version == version
