"""Secrets among the settings: no error, no log and no report shows one, whatever is wrong with it or beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import tomli_w
from hypothesis import example, given
from hypothesis import strategies as st
from property_tests import examples
from pydantic import BaseModel

from starling.cli.recipe.schema import Recipe
from starling.common.errors import ConfigError
from starling.common.secret_settings import HIDDEN, is_marked, is_secret, names_secret, without_secrets
from starling.common.setting_fields import item_of, section_of
from starling.common.settings import ServiceSettings, flags_tree, load, validate
from starling.controller.settings import ControllerProcess
from starling.policy.shell.loading import PolicyProcess
from starling.reward.shell.main import RewardProcess
from starling.rollout.settings import RolloutProcess, TeacherProcess

BASE: dict[str, Any] = {
    "model": {"path": "m"},
    "data": {"source": "p.jsonl", "format": "{question}"},
    "reward": {"scorers": [{"name": "exact_match"}]},
    "teacher": {"path": "t"},
}
SCHEMAS: tuple[type[ServiceSettings], ...] = (
    Recipe, ControllerProcess, PolicyProcess, RolloutProcess, TeacherProcess, RewardProcess,
)  # fmt: skip
FREE = ("reward.scorers[0].options.api_key", "policy.saving.storage_options.secret", "data.options.token")
"""Secrets in tables of any keys."""
NO_SECRETS = ("reward.scorers[].key",)
"""Settings whose names are like those of secrets."""
SECRETS = st.text("abcdefghijkmnopqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ23456789!#$%&*+-./:;<=>?@^_~", min_size=12).map(
    lambda text: f"q{text}"
)
SHORT = 6
"""So many characters of a secret in a row are a part of it, and not a word of the error."""


class Case(NamedTuple):
    """One mistake: the sources of the settings, and what the error must name."""

    tree: dict[str, Any]
    flags: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    names: str = ""


def marked(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the keys of the secret settings below `schema`."""
    for name, field in schema.model_fields.items():
        if is_marked(field):
            yield f"{prefix}{name}"
        if (nested := section_of(field)) is not None:
            yield from marked(nested, f"{prefix}{name}.")
        if (item := item_of(field)) is not None:
            yield from marked(item, f"{prefix}{name}[0].")


def base(schema: type[BaseModel]) -> dict[str, Any]:
    """Return settings that are valid."""
    return json.loads(json.dumps({name: BASE[name] for name in schema.model_fields if name in BASE}))


def put(schema: type[BaseModel], key: str, value: Any, **others: Any) -> dict[str, Any]:
    """Return valid settings with a value at `key`, and `others` beside it."""
    tree = base(schema)
    *sections, name = key.replace("[0]", "").split(".")
    table: Any = tree
    for section in sections:
        table = table.setdefault(section, {})
        table = table[0] if isinstance(table, list) else table
    table[name] = value
    table.update(others)
    return tree


def mistakes(schema: type[BaseModel], key: str, secret: str) -> Iterator[Case]:
    """Yield mistakes with and beside a secret."""
    section, _, name = key.rpartition(".")
    misspelt = f"{name[:-1]}z"
    yield Case(put(schema, key, secret, zzz=1))
    yield Case(put(schema, key, f"{secret}\0"), names=name)
    if key in FREE:
        yield Case(put(schema, section, [{name: secret}]), names=section.replace("[0]", ".0"))
        if "[" not in section:
            variable = f"STARLING_{section.upper().replace('.', '__')}"
            yield Case(base(schema), (), ((variable, json.dumps({name: secret})[:-1]),), names=variable)
        return
    for wrong in ([secret], {"inner": secret}, int.from_bytes(secret.encode()[:20])):
        yield Case(put(schema, key, wrong), names=key)
    yield Case(put(schema, key, secret, zzz=1), names=f"{section}.zzz")
    yield Case(put(schema, key, secret, port=[1], host=[1]), names=f"{section}.host")
    yield Case(put(schema, f"{section}.{misspelt}", secret), names=misspelt)
    yield Case(put(schema, section, [{name: secret}]), names=section)
    yield Case(put(schema, section, json.dumps({name: secret})), names=section)
    variable = f"STARLING_{section.upper().replace('.', '__')}"
    yield Case(base(schema), (), ((variable, json.dumps({name: secret})[:-1]),), names=variable)
    yield Case(base(schema), (), ((f"{variable}__{misspelt.upper()}", secret),), names=misspelt)
    yield Case(base(schema), (f"--{section}.{misspelt}", secret), names=misspelt)
    yield Case(base(schema), (f"--{name}={secret}",), names=name)
    yield Case(base(schema), (f"--{key}", "one", secret), names="is not a flag")


def says(schema: type[ServiceSettings], case: Case, folder: Path) -> str:
    """Return the error of a mistake; empty if it is none."""
    file = folder / "settings.toml"
    file.write_text(tomli_w.dumps(case.tree))
    with mock.patch.dict(os.environ, dict(case.variables)):
        try:
            load(schema, [file], case.flags)
        except ConfigError as error:
            return str(error)
    return ""


def parts(secret: Any) -> set[str]:
    text = str(secret)
    return {text[i : i + SHORT] for i in range(len(text) - SHORT + 1)}


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.__name__)
@given(secret=SECRETS)
@example(secret="qZebra://Quagga:Okapi42@Tapir:6379/0")
@examples(5, deadline=None)
def test_no_error_shows_a_secret(schema: type[ServiceSettings], secret: str, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("settings")
    free = [key for key in FREE if key.split(".")[0] in schema.model_fields]
    for key in (*marked(schema), *free):
        for case in mistakes(schema, key, secret):
            text = says(schema, case, folder)
            assert case.names in text, (key, case)
            known = text.replace(str(folder), "")
            assert not parts(secret) & parts(known), (key, text)
            assert str(int.from_bytes(secret.encode()[:20])) not in text, (key, text)


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.__name__)
def test_every_setting_with_the_name_of_a_secret_is_marked(schema: type[ServiceSettings]) -> None:
    def unmarked(schema: type[BaseModel], prefix: str) -> Iterator[str]:
        for name, field in schema.model_fields.items():
            if names_secret(name) and not is_marked(field):
                yield f"{prefix}{name}"
            for nested, inner in ((section_of(field), f"{prefix}{name}."), (item_of(field), f"{prefix}{name}[].")):
                if nested is not None:
                    yield from unmarked(nested, inner)

    assert set(unmarked(schema, "")) <= set(NO_SECRETS), "mark them with the type `Secret`, or add them to NO_SECRETS"


@pytest.mark.parametrize("name", ["cookie", "API_KEYS", "client_secrets", "hf-token", "aws.access_key_id", "bearer"])
def test_keys_of_tables_with_the_names_of_secrets_are_secret(name: str) -> None:
    assert names_secret(name)


def test_settings_in_a_log_have_no_secrets() -> None:
    tree = put(Recipe, "reward.http.token", "hunter2hunter")
    tree["rollout"] = {"api": {"key": "hunter2hunter"}}
    recipe = validate(Recipe, tree)
    assert "hunter2" not in repr(recipe)
    assert recipe.reward is not None
    assert recipe.reward.http.token == "hunter2hunter"


def test_copy_without_secrets_keeps_the_rest() -> None:
    tree = put(Recipe, FREE[0], "hunter2hunter", max_tokens=5)
    tree["reward"]["http"] = {"token": "hunter2hunter", "redis_url": "", "port": 1}
    reward = without_secrets(Recipe, tree)["reward"]
    assert reward["http"] == {"token": HIDDEN, "redis_url": "", "port": 1}
    assert reward["scorers"][0] == {"name": "exact_match", "options": {"api_key": HIDDEN, "max_tokens": 5}}


@pytest.mark.parametrize(
    ("key", "secret"),
    [
        ("reward.http.token", True), ("rollout.api.key", True), ("reward.http.redis_url", True),
        ("reward.scorers[3].options.api_key", True), ("judge.api_key", True), ("reward.http.tokens", True),
        ("policy.saving.storage_options.client_kwargs.aws_secret_access_key", True),
        ("reward.scorers[3].key", False), ("reward.scorers[3].options.max_tokens", False), ("reward.http", False),
        ("rollout.vllm.engine_args.max_num_batched_tokens", False), ("nowhere.at.all", False),
    ],
)  # fmt: skip
def test_secret_is_found_by_its_key(key: str, secret: bool) -> None:
    assert is_secret(Recipe, key) is secret


def test_flag_of_a_secret_may_look_like_another_value() -> None:
    assert flags_tree(RewardProcess, ["--reward.http.token", "123"]) == {"reward": {"http": {"token": "123"}}}
