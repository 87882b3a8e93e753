"""`docs/reference/algorithms.md`: its table matches the code, and its recipes are valid."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, get_args

import pytest

from starling.algo.algorithm import ALGORITHMS, Aggregate, Algorithm, functions
from starling.algo.loss.regularisers import KlKind
from starling.cli.recipe.schema import load_recipe
from starling.common.errors import ConfigError
from starling.policy.settings.algorithm import AlgorithmSettings, CorrectionSettings
from starling.policy.settings.supervised import DpoSettings, RewardModelSettings
from starling.policy.train.loss.objective import check_objective
from starling.reward.score.scorers.registry import resolve_scorer

ROOT: Final = Path(__file__).parents[4]
PAGE: Final = (ROOT / "docs/reference/algorithms.md").read_text()
BASE: Final = ROOT / "tests" / "system" / "recipes" / "tiny.toml"
SNIPPETS: Final = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)


def short(function: Callable[..., Any] | str) -> str:
    return str(function).rpartition(":")[2]


def options(algorithm: Algorithm) -> str:
    """List the options in force: those of the algorithm override those of its functions."""
    found: dict[str, Any] = {}
    for function in functions(algorithm, {}):
        parameters = inspect.signature(function).parameters.values()
        found |= {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}
    shown = {name: value for name, value in found.items() if name != "epsilon" and (name, value) != ("dual_clip", 0.0)}
    return ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in shown.items()
    )


def row(name: str, algorithm: Algorithm) -> str:
    corrections = [f"{one.kind} {one.level} {one.high:g}" for one in algorithm.corrections]
    functions_ = (short(algorithm.advantage), short(algorithm.loss), algorithm.aggregate, algorithm.old)
    return " | ".join([*(f"`{cell}`" for cell in (name, *functions_)), "; ".join([options(algorithm), *corrections])])


def test_algorithms_page_table_matches_code() -> None:
    rows = re.findall(r"^\| (`\w+` \| `\w+` \| `\w+` \| `\w+` \| `\w+` \| [^|]+) \| [^|]+ \|$", PAGE, re.MULTILINE)
    assert rows == [row(name, algorithm) for name, algorithm in ALGORITHMS.items()]


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_algorithms_page_recipes_are_valid(snippet: str, tmp_path: Path) -> None:
    """Each works when added to a recipe, and everything it names can be resolved."""
    given = tmp_path / "given.toml"
    given.write_text(snippet)
    here = tmp_path / "here"  # the folder of a model that the page takes to be somewhere else
    here.mkdir()
    (here / "config.json").write_text("{}")
    (here / "model.safetensors").touch()
    recipe = load_recipe([BASE, given], ["--teacher.path", str(here)] if "[teacher]" in snippet else [])
    check_objective(recipe.policy.algorithm)
    assert recipe.reward is not None
    for scorer in recipe.reward.scorers:
        resolve_scorer(scorer.name, scorer.options)
    for section, keys in tomllib.loads(snippet).get("policy", {}).items():
        assert keys, f"[policy.{section}] sets nothing"


def test_algorithms_page_invalid_recipe_is_detected(tmp_path: Path) -> None:
    given = tmp_path / "given.toml"
    given.write_text(
        next(one for one in SNIPPETS if "num_minibatches" in one).replace("num_minibatches", "minibatches")
    )
    with pytest.raises(ConfigError, match=r"unknown setting policy\.algorithm\.minibatches"):
        load_recipe([BASE, given], [])


def test_algorithms_page_explains_every_setting() -> None:
    explained = set(re.findall(r"`([a-z0-9_]+)`", PAGE))
    settings = (AlgorithmSettings, DpoSettings, RewardModelSettings)
    names_of_settings = {name for section in settings for name in section.model_fields}
    names_of_settings |= {*get_args(Aggregate), *get_args(KlKind)}
    names_of_settings |= {
        one for name in ("kind", "level") for one in get_args(CorrectionSettings.model_fields[name].annotation)
    }
    assert sorted(names_of_settings - explained) == []


@pytest.mark.campaign
def test_algorithms_page_shows_the_figures_of_the_script() -> None:
    """`bench/departures.py` computes both sides; its figures are those of the table."""
    command = [sys.executable, str(ROOT / "bench" / "departures.py")]
    printed = subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    (line,) = printed.stdout.splitlines()
    detail = json.loads(line)["detail"]
    rows = re.findall(r"^\| ([^|]+) \| ([\d.]+) \| ([\d.]+) \| [^|]+ \|$", PAGE, re.MULTILINE)
    shown = {name: {"relative": float(relative), "cosine": float(cosine)} for name, relative, cosine in rows}
    assert shown.keys() == detail["departures"].keys()
    for name, figures in detail["departures"].items():
        assert shown[name] == pytest.approx(figures, rel=0.03, abs=0.002), name
    assert set(detail["largest_log_ratio"].values()) == {20}
    assert "A log-ratio beyond 20 nats has no gradient here" in PAGE
