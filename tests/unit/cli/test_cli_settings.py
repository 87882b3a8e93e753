"""`starling settings`: the search, and the recipe with every default."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from starling.cli.main import main
from starling.cli.recipe.schema import Recipe, load_recipe
from starling.cli.settings.search import find_settings
from starling.cli.settings.template import CHOICES, default_recipe
from starling.common.errors import ConfigError
from starling.common.settings import iter_settings


def test_search_finds_words_in_keys_and_texts() -> None:
    keys = [one.key for one in find_settings(["kl"])]
    assert {"policy.algorithm.kl_coefficient", "policy.algorithm.kl_estimator"} <= set(keys)
    assert "kl" in keys[0], "matches of keys come first"
    assert [one.key for one in find_settings(["rl.group-size"])] == ["rl.group_size"]
    assert [one.key for one in find_settings(["--rl.group-size"])] == ["rl.group_size"]
    both = find_settings(["rollout", "TIMEOUT"])
    assert both
    assert all("rollout" in f"{one.key} {one.text}".lower() for one in both)
    assert all("timeout" in f"{one.key} {one.text}".lower() for one in both)
    with pytest.raises(ConfigError, match=r"no setting has 'grop_size' .*did you mean rl.group_size\?"):
        find_settings(["grop_size"])


def test_every_setting_is_printed_with_type_default_and_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings"]) == 0
    text = capsys.readouterr().out
    for one in iter_settings(Recipe):
        value = "(required)" if one.default == "required" else f"= {one.default}"
        assert f"{one.key}  {one.type}  {value}\n" in text
    assert main(["settings", "rl.group_size"]) == 0
    assert capsys.readouterr().out.startswith("rl.group_size  int  = ")
    assert main(["settings", "rl.group_size", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["type"] == "int"


def test_recipe_with_every_default_is_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "--toml"]) == 0
    path = tmp_path / "all.toml"
    path.write_text(capsys.readouterr().out)
    bare = tmp_path / "bare.toml"
    bare.write_text(
        f'[data]\nsource = "{CHOICES["data.source"]}"\nformat = "{CHOICES["data.format"]}"\n'
        f"[rl]\nnum_steps = {CHOICES['rl.num_steps']}\n"
        f'[[reward.scorers]]\nname = "{CHOICES["reward.scorers[].name"]}"\n[model.scratch.config]\n'
        + "".join(f"{key} = {value}\n" for key, value in CHOICES["model.scratch.config"].items())
    )
    assert load_recipe([path], []).model_dump() == load_recipe([bare], []).model_dump()


def test_recipe_with_every_default_has_every_setting_and_its_text() -> None:
    text = default_recipe()
    keys, table = set(), ""
    for line in text.splitlines():
        if line.startswith("# "):
            continue
        if line.removeprefix("#").startswith("["):
            table = line.strip("#[]")
            keys.add(table)
        elif " = " in line:
            keys.add(f"{table}.{line.removeprefix('#').partition(' = ')[0]}")
    assert {one.key.replace("[]", "") for one in iter_settings(Recipe)} <= keys
    for one in iter_settings(Recipe):
        assert one.text.splitlines()[0] in text, one.key


def test_optional_lines_of_the_recipe_are_toml() -> None:
    lines = (line if line.startswith("# ") else line.removeprefix("#") for line in default_recipe().splitlines())
    assert tomllib.loads("\n".join(lines))["teacher"]["path"] == ""
