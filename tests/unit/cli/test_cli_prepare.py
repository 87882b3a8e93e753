"""`starling prepare`: keys, configuration and model of a run, without a service."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from starling.cli.prepare.folder import prepare, replica_names
from starling.cli.recipe.schema import Recipe, load_recipe
from starling.cli.run.attempt import Attempt
from starling.common.errors import ConfigError
from starling.common.net.keyring import list_keys
from starling.common.settings import load

RECIPE = Path(__file__).parents[3] / "tests/system/recipes/tiny.toml"


def names(*flags: str, **counts: int) -> list[str]:
    return replica_names(load_recipe([RECIPE], flags), counts)


def test_replicas_are_those_of_the_recipe_or_as_many_as_given() -> None:
    assert names() == ["policy-0", "rollout-0", "reward-0"]
    elsewhere = ("--launch.num-rollouts=0", "--controller.num-rollouts=3")
    assert names(*elsewhere) == ["policy-0", "rollout-0", "rollout-1", "rollout-2", "reward-0"]
    assert names(rollout=1, reward=2, teacher=0) == ["policy-0", "rollout-0", "reward-0", "reward-1"]


def test_prepared_folder_has_what_services_and_the_supervisor_read(tmp_path: Path) -> None:
    recipe = load_recipe([RECIPE], ["--run.name", "mine"])
    attempt = Attempt.create_at(tmp_path / "run")
    assert prepare(recipe, attempt, ["policy-0"], None) == ["policy-0", "observer-0", "operator-0"]
    config = load(Recipe, [attempt.config])
    assert config.run.id.startswith("mine/run/")
    assert (Path(config.model.path), config.policy.init) == (tmp_path / "run/model", "random")
    assert (tmp_path / "run/model/config.json").exists()
    attempt.prepare(load(Recipe, [attempt.recipe]), [])  # `starling run --resume` accepts it
    assert load(Recipe, [attempt.config]).run.id == config.run.id


def test_repeated_command_adds_keys_and_changes_nothing_else(tmp_path: Path) -> None:
    recipe, attempt = load_recipe([RECIPE], []), Attempt.create_at(tmp_path / "run")
    models = tmp_path / "models"
    prepare(recipe, attempt, ["policy-0"], models)
    assert (models / "scratch-tiny/config.json").exists()
    kept = {path: path.read_bytes() for path in (attempt.config, attempt.recipe, attempt.key("policy-0"))}
    again = load_recipe([RECIPE], ["--rl.num-steps", "99"])
    assert prepare(again, attempt, ["policy-0", "rollout-0", "rollout-1"], models) == ["rollout-0", "rollout-1"]
    assert {path: path.read_bytes() for path in kept} == kept
    assert len(list_keys(tmp_path / "run/keys")) == 5


def test_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot make the folder .*file/run: .*; give another one"):
        Attempt.create_at(tmp_path / "file/run")


def test_command_says_how_services_are_started(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "starling.cli.main", "prepare", str(RECIPE), "--dir", "run"]
    first, second = (
        subprocess.run([*command, *more], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True).stdout
        for more in (("--rollouts", "1"), ("--rollouts", "3"))
    )
    run = tmp_path / "run"
    assert f"{run}/config.toml is written" in first
    assert f"starling controller --config {run}/config.toml --dir {run}" in first
    assert f"--config {run}/config.toml --dir {run} --name rollout-0 --controller tcp://HOST:PORT" in first
    assert "is there already, and left as it is" in second
    assert "new: rollout-1, rollout-2\n" in second
