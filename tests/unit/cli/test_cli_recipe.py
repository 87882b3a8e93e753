"""What follows from a recipe that nobody wrote into it."""

from __future__ import annotations

from pathlib import Path

import pytest

from starling.cli.recipe import IMPORTS_S, load_recipe

RECIPE = Path(__file__).parents[3] / "tests/system/recipes/tiny.toml"


@pytest.mark.parametrize(
    ("flags", "start_s"),
    [
        ([], 120.0),
        (["--rollout.engine", "vllm"], 600.0 + IMPORTS_S),
        (["--rollout.engine", "vllm", "--rollout.vllm.start-timeout-s", "20"], 120.0),
        (["--rollout.engine", "vllm", "--controller.start-s", "1000"], 1000.0),
    ],
)
def test_a_run_waits_for_its_rollouts_as_long_as_their_engine_may_take(flags: list[str], start_s: float) -> None:
    assert load_recipe([RECIPE], flags).controller.start_s == start_s
