"""Pools of rollouts in a recipe: their sum, the settings of each, and what is refused."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from starling.cli.recipe.pools import RolloutPool, inline_toml, pool_of
from starling.cli.recipe.schema import Recipe, load_recipe, resolved, to_toml
from starling.cli.run.attempt import Attempt
from starling.cli.run.placements import first_placements, placement_of
from starling.common.errors import ConfigError
from starling.common.settings import load
from starling.rollout.settings import RolloutProcess

RECIPE = Path(__file__).parents[3] / "tests/system/recipes/tiny.toml"
TWO = [
    {"count": 2, "gpus": 1, "settings": {"num_slots": 4, "vllm": {"engine_args": {"max_num_seqs": 8}}}},
    {
        "count": 1,
        "engine": "vllm",
        "tensor_parallel_size": 2,
        "gpus": 2,
        "gpu_kind": "h100",
        "partition": "big",
        "node_selector": {"zone": "a"},
    },
]


def recipe_with(folder: Path, pools: list[dict[str, Any]], *flags: str, **rollout: Any) -> Recipe:
    (folder / "pools.toml").write_text(tomli_w.dumps({"rollout": {**rollout, "pools": pools}}))
    text = tomllib.loads(RECIPE.read_text())
    del text["launch"]["num_rollouts"]
    (folder / "recipe.toml").write_text(tomli_w.dumps(text))
    return load_recipe([folder / "recipe.toml", folder / "pools.toml"], flags)


def test_pools_make_the_number_of_rollouts(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, TWO)
    assert recipe.replicas["rollout"] == recipe.launch.num_rollouts == recipe.controller.num_rollouts == 3
    assert recipe.controller.start_s > 600, "one pool has vllm, which may take that long to start"


def test_each_replica_is_placed_with_the_settings_of_its_pool(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, TWO)
    placed = {one.name: one for one in first_placements(recipe, Attempt(tmp_path), "tcp://h:1")}
    first, last = placed["rollout-1"], placed["rollout-2"]
    assert first.settings == ("--rollout.num_slots=4", '--rollout.vllm.engine_args={"max_num_seqs" = 8}')
    assert first.arguments[-2:] == first.settings
    assert (first.num_gpus, first.gpu_kind, first.partition, first.node_selector) == (1, "", "", {})
    assert last.settings == ('--rollout.engine="vllm"', "--rollout.vllm.tensor_parallel_size=2")
    assert (last.num_gpus, last.gpu_kind, last.partition, last.node_selector) == (2, "h100", "big", {"zone": "a"})
    assert placed["policy-0"].settings == placed["reward-0"].settings == ()
    assert placement_of(recipe, Attempt(tmp_path), "tcp://h:1", "rollout", "rollout-9").settings == last.settings


def test_services_read_the_configuration_with_the_flags_of_a_pool(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, TWO, max_rows=64)
    (tmp_path / "run").mkdir()
    config = tmp_path / "config.toml"
    config.write_text(to_toml(resolved(recipe, tmp_path / "run")))
    others = tuple(tomllib.loads(config.read_text()))
    settings = [load(RolloutProcess, [config], pool.flags(), others=others).rollout for pool in recipe.rollout.pools]
    assert [(one.engine, one.num_slots, one.max_rows) for one in settings] == [
        ("transformers", 4, 64),
        ("vllm", 16, 64),
    ]
    assert settings[0].vllm.engine_args == {"max_num_seqs": 8}
    assert settings[1].vllm.tensor_parallel_size == 2


def test_resolved_recipe_is_read_again_as_it_was(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, TWO)
    (tmp_path / "again.toml").write_text(to_toml(recipe))
    assert load_recipe([tmp_path / "again.toml"], []).rollout == recipe.rollout


@pytest.mark.parametrize(
    ("pools", "flags", "problem"),
    [
        ([{"count": 0}], [], r"rollout.pools.0.count = 0: .*greater than or equal to 1"),
        ([{"count": 2}], ["--launch.num-rollouts=3"], r"num_rollouts = 3, and the counts of 1 .* add up to 2; remove"),
        ([{"settings": {"num_slotz": 1}}], [], r"rollout.pools.0.settings.num_slotz = 1; did you mean .*num_slots\?"),
        ([{}, {"settings": {"num_slots": "x"}}], [], r"rollout.pools.1: num_slots = 'x'"),
        ([{"settings": {"num_slots": 0}}], [], r"rollout.pools.0.num_slots = 0 is for replicas that only follow"),
        ([{"settings": {"max_rows": 2}}], [], r"rl.group_size = 4 is more than rollout.pools.0.max_rows = 2"),
        ([{"settings": {"transport": "tcp"}}], [], r"pools.0.settings has transport, but .*; set rollout.transport"),
        ([{"settings": {"api": {"key": "s"}}}], [], r"pools.0.settings has api.key, which other users could read"),
        ([{"engine": "vlm"}], [], r"vlm.*vllm"),
        ([{"num": 1}], [], r"unknown setting rollout.pools.0.num = 1"),
    ],
)
def test_wrong_pool_is_one_sentence(
    pools: list[dict[str, Any]], flags: list[str], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        recipe_with(tmp_path, pools, *flags)
    assert "\n" not in str(caught.value)


def test_rollouts_are_numbered_through_the_pools() -> None:
    pools = [RolloutPool(count=2), RolloutPool(count=1)]
    assert [pool_of(pools, number) is pools[0] for number in range(5)] == [True, True, False, False, False]
    assert pool_of([], 0) is None


def test_values_are_written_as_toml_on_one_line() -> None:
    value = {"a.b": [1, 2.5, True], "c": 'x "y" \\ ü\n', "d": {}}
    assert tomllib.loads(f"value = {inline_toml(value)}")["value"] == value
