"""Numbers in recipes: every one has a range, and a value outside is one sentence that names it."""

from __future__ import annotations

import math
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from starling.cli.recipe.schema import Recipe, to_toml
from starling.common.errors import ConfigError
from starling.common.ranges import MAX_STALENESS
from starling.common.settings import item_of, load, section_of
from starling.controller.core.training.dynamic_settings import DYNAMIC

RECIPE = (
    '[data]\nsource = "p.jsonl"\nheld_out = 4\n[model]\npath = "m"\n[[reward.scorers]]\nname = "exact_match"\n'
    '[teacher]\npath = "t"\n[sft.data]\nsource = "p.jsonl"\n[preference.data]\nsource = "p.jsonl"\n'
)
NOT_NUMBERS = (math.nan, math.inf, -math.inf)
ABSURD: tuple[float, ...] = (math.nan, 1e300, 10**30)
MORE_ABSURD: tuple[float, ...] = (math.inf, -math.inf, -1e300, -(10**30), 1 << 20_000)
FREE = {
    "policy.algorithm.options": "the arguments of a loss, which checks them itself",
}
"""Settings with numbers that may be any, and why."""
SCORERS = ("reward.scorers", "controller.trained_scorers")
NEGATIVE = {
    **{f"{scorers}[].weight": "a penalty has a negative weight" for scorers in SCORERS},
    **{
        f"{reward}.clip_{bound}": "a reward may be negative"
        for reward in ("reward", *(f"{scorers}[]" for scorers in SCORERS))
        for bound in ("min", "max")
    },
}
"""Settings that may be -1, and why."""
LISTS: dict[str, dict[str, Any]] = {
    "evaluation.tasks": {"name": "a", "data": {"source": "p.jsonl"}},
    "reward.scorers": {"name": "exact_match"},
    "controller.trained_scorers": {"label": "exact_match", "weight": 1.0},
    "policy.algorithm.corrections": {"kind": "truncate", "high": 2.0},
    "launch.hosts": {"host": "a"},
    "rollout.pools": {"count": 1},
}
"""Lists of sections, with the smallest valid member."""


def kinds_in(annotation: Any) -> Iterator[type]:
    """Yield the types that an annotation consists of."""
    if isinstance(annotation, type) and not typing.get_args(annotation):
        yield annotation
    if typing.get_origin(annotation) is not typing.Literal:
        for argument in typing.get_args(annotation):
            yield from kinds_in(argument)


def fields(schema: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every setting with its key; that of a member of a list is ``section.list[].setting``."""
    for name, field in schema.model_fields.items():
        nested, item = section_of(field), _member(field)
        if nested is not None or item is not None:
            suffix = "." if nested is not None else "[]."
            yield from fields(nested or item, f"{prefix}{name}{suffix}")  # type: ignore[arg-type]
        else:
            yield f"{prefix}{name}", field


def _member(field: FieldInfo) -> type[BaseModel] | None:
    """Return the class of the members of a list of sections, also of an optional one."""
    for annotation in (field.annotation, *typing.get_args(field.annotation)):
        found = item_of(FieldInfo(annotation=annotation))
        if found is not None:
            return found
    return None


NUMERIC = {key: field for key, field in fields(Recipe) if {int, float} & set(kinds_in(field.annotation))}


def values(field: FieldInfo, number: float) -> list[Any]:
    """Return what the setting of `field` is given as, to contain `number`."""
    annotation = field.annotation
    for part in (annotation, *typing.get_args(annotation)):
        if typing.get_origin(part) is dict:
            return [{"x": number}]
        if typing.get_origin(part) is tuple:
            return [[number], [number, 0.5], [0.5, number]] if typing.get_args(part)[-1] is not ... else [[number]]
    return [number]


def tree_with(key: str, value: Any) -> dict[str, Any]:
    """Return a recipe's tree that sets `key`."""
    before, of_a_list, after = key.partition("[].")
    tree: Any = value
    if of_a_list:
        tree = {**LISTS[before]}
        _set(tree, after, value)
        tree = [tree]
    root: dict[str, Any] = {}
    _set(root, before, tree)
    return root


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        tree[section] = dict(tree.get(section, {}))
        tree = tree[section]
    tree[name] = value


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "base.toml"
    path.write_text(RECIPE)
    return path


def flags_of(tree: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the tree as flags, with its values as TOML."""
    flags = []
    for key, value in tree.items():
        if isinstance(value, dict) and not set(value) & {"x"}:
            flags += flags_of(value, f"{prefix}{key}.")
        else:
            flags.append(f"--{prefix}{key}={_toml(value)}")
    return flags


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, int) and abs(value) > 1 << 64:
        return hex(value) if value > 0 else str(value)  # TOML reads these of any length
    return repr(value)


def refuse(recipe: Path, key: str, number: float) -> None:
    for value in values(NUMERIC[key], number):
        with pytest.raises(ConfigError) as caught:
            load(Recipe, [recipe], flags_of(tree_with(key, value)))
        message = str(caught.value)
        assert "\n" not in message
        assert key.rpartition(".")[2] in message, message


@pytest.mark.sample(60)
@pytest.mark.parametrize("key", [key for key in NUMERIC if key not in FREE])
@pytest.mark.parametrize(
    "numbers", [ABSURD, pytest.param(MORE_ABSURD, marks=pytest.mark.campaign)], ids=["some", "more"]
)
def test_absurd_number_is_refused(key: str, numbers: tuple[float, ...], recipe: Path) -> None:
    for number in numbers:
        refuse(recipe, key, number)
    if key not in NEGATIVE:
        refuse(recipe, key, -1)


def test_free_numbers_have_a_reason_and_exist() -> None:
    assert {*FREE, *NEGATIVE} <= NUMERIC.keys()
    assert len(NUMERIC) > 150


@given(
    st.sampled_from(sorted(set(NUMERIC) - set(FREE))),
    st.one_of(st.integers(), st.floats(), st.integers(0, 1 << 32), st.floats(0, 10)),
)
def test_accepted_number_survives_a_recipe(key: str, number: float) -> None:
    """What a section accepts is written to recipe.toml, and read again as the same."""
    for value in values(NUMERIC[key], number):
        tree = tomllib.loads(RECIPE)
        merge(tree, tree_with(key, value))
        try:
            recipe = Recipe.model_validate(tree)
        except ValidationError:
            continue
        assert Recipe.model_validate(tomllib.loads(to_toml(recipe))) == recipe


def merge(tree: dict[str, Any], changes: dict[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            merge(tree[key], value)
        else:
            tree[key] = value


NUMBERS = [
    -1,
    0,
    1e-6,
    1e-4,
    1e-3,
    0.01,
    0.5,
    1,
    1.5,
    2,
    999,
    1e3,
    1001,
    1e6,
    1e6 + 1,
    10**9,
    10**9 + 1,
    2**24,
    2**31 - 1,
    2**31,
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("key", DYNAMIC)
def test_operator_may_set_what_a_recipe_may(key: str, recipe: Path) -> None:
    """A temperature of 0 is for evaluations: the policy could not learn from one way to answer."""
    for number in (*NUMBERS, *NOT_NUMBERS, 1e300):
        try:
            load(Recipe, [recipe], flags_of(tree_with(key, number)))
            allowed = True
        except ConfigError:
            allowed = False
        if (key, number) != ("sampling.temperature", 0):
            assert DYNAMIC[key].takes(float(number)) == allowed, number


def test_groups_at_a_time_are_bounded(recipe: Path) -> None:
    flags = ["--rl.prompts-per-step=2000", f"--rl.max-staleness={MAX_STALENESS}"]
    with pytest.raises(ConfigError, match=r"rl.prompts_per_step = 2000 .* 2002000 groups .* lower one of them"):
        load(Recipe, [recipe], flags)
