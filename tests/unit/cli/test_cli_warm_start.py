"""Warm start: the saved states that a recipe can continue from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from starling.cli.main import main
from starling.cli.recipe.schema import Recipe
from starling.cli.recipe.warm_start import start_from_state
from starling.common.errors import ConfigError
from starling.common.ids import TrainerKind
from starling.policy.train.checkpoint.header import StateHeader, TrainerState, encode_header
from starling.policy.train.checkpoint.storage import MANIFEST

SCRATCH = {
    "model_type": "qwen3",
    "alphabet": "ab>",
    "max_length": 16,
    "config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
}
STEPS: dict[str, Any] = {
    "sft": {"sft": {"num_steps": 4}},
    "rl": {"sft": {"num_steps": 2}, "rl": {"num_steps": 2}, "reward": {"scorers": [{"name": "exact_match"}]}},
    "dpo": {"preference": {"num_steps": 4}},
    "reward_model": {"preference": {"num_steps": 4}},
}


def recipe(kind: str) -> Recipe:
    """Return a recipe of four steps."""
    tree = {"run": {"kind": kind}, "model": {"scratch": SCRATCH}, "data": {"source": "rows.jsonl"}, **STEPS[kind]}
    return Recipe.model_validate(tree)


def write_state(folder: Path, kind: TrainerKind, version: int) -> str:
    """Write the manifest of a state without tensors, and return its path."""
    begun_at = 2 if kind == "rl" else -1
    state = StateHeader(
        run="other",
        version=version,
        next_prompt=7,
        trainer=TrainerState(kind=kind, num_steps=version, total_steps=9, begun_at=begun_at),
        python_random=(3, (0,) * 625, None),
        numpy_random=("MT19937", (0,) * 624, 0, 0, 0.0),
        metrics={},
        parts="parts",
        digests={},
    )
    (folder / MANIFEST).write_bytes(encode_header(state))
    return str(folder)


@pytest.mark.parametrize(
    ("kind", "of", "version"),
    [("sft", "sft", 3), ("rl", "sft", 1), ("rl", "rl", 3), ("dpo", "dpo", 3), ("reward_model", "reward_model", 3)],
)
def test_recipe_continues_from_a_state_of_its_kind(tmp_path: Path, kind: str, of: TrainerKind, version: int) -> None:
    begun = start_from_state(recipe(kind), write_state(tmp_path, of, version))
    assert (begun.controller.begin_version, begun.controller.begin_prompt) == (version, 7)
    assert begun.policy.saving.begin_from == str(tmp_path)


@pytest.mark.parametrize(
    ("kind", "of"), [("sft", "rl"), ("sft", "dpo"), ("rl", "dpo"), ("dpo", "sft"), ("dpo", "reward_model")]
)
def test_a_state_of_another_kind_of_run_is_refused(tmp_path: Path, kind: str, of: TrainerKind) -> None:
    with pytest.raises(ConfigError, match=f"its last step was of kind {of}, and the recipe has run.kind = '{kind}'; "):
        start_from_state(recipe(kind), write_state(tmp_path, of, 3))


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("sft", "sft.num_steps"),
        ("rl", "rl.num_steps or sft.num_steps"),
        ("dpo", "preference.num_steps"),
        ("reward_model", "preference.num_steps"),
    ],
)
def test_a_state_of_the_last_step_is_refused_with_the_setting_to_raise(
    tmp_path: Path, kind: TrainerKind, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=f"it has version 4, and the recipe ends with version 4; raise {remedy}$"):
        start_from_state(recipe(kind), write_state(tmp_path, kind, 4))


def test_folder_of_a_run_stands_for_its_newest_attempt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, version in ((9, 3), (10, 4)):
        state = tmp_path / "mine" / f"attempt-{number}" / "states" / f"version-{version}"
        state.mkdir(parents=True)
        write_state(state, "sft", version)
    tiny = Path(__file__).parents[3] / "tests/system/recipes/tiny.toml"
    flags = ["--run.kind", "sft", "--sft.num-steps", "2", "--evaluation.at-end", "false", "--data.held-out", "0"]
    assert main(["run", str(tiny), *flags, "--from", str(tmp_path / "mine"), "--dry-run"]) == 2
    assert f"cannot continue from {tmp_path / 'mine' / 'attempt-10'}: it has version 4" in capsys.readouterr().err
