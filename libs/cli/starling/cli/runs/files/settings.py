"""Settings of runs as their recipe.toml has them: those that are no defaults, and those in which runs differ."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, PydanticUndefined, to_jsonable_python

from starling.cli.recipe.schema import Recipe
from starling.cli.run.attempt import Attempt
from starling.common.errors import ConfigError
from starling.common.secret_settings import HIDDEN, is_secret, without_passwords
from starling.common.setting_fields import item_of, section_of
from starling.common.settings import read_toml

MAX_SETTINGS: Final = 2000
MAX_DEPTH: Final = 32
MAX_CHARACTERS: Final = 300
ABSENT: Final = "–"
DERIVED: Final = frozenset(
    {
        *(
            "colocate",
            "fan_out",
            "rollout_transport",
            "max_model_len",
            "max_media_bytes",
            "teacher_top_k",
            "model_path",
        ),
        *("num_scorers", "evaluation_scorers", "trained_scorers", "compares_scores"),
    }
)
"""Settings of the controller that only repeat others of the recipe; see `load_recipe`."""
_OWN: Final = ("run.id",)


def settings_of(attempt: Attempt) -> dict[str, Any]:
    """Return the settings of an attempt by their keys, ``reward.scorers[0].name``.

    Empty where no recipe can be read.
    """
    try:
        tree = read_toml(attempt.recipe)
    except ConfigError:
        return {}
    found: dict[str, Any] = {}
    _flatten(tree, "", found)
    return {key: value for key, value in found.items() if key not in _OWN}


def changed_settings(attempt: Attempt) -> list[tuple[str, str, str]]:
    """Return key, value and default of the settings that are no defaults."""
    defaults = default_settings()
    rows = []
    for key, value in settings_of(attempt).items():
        if key.removeprefix("controller.") in DERIVED:
            continue
        default = defaults.get(re.sub(r"\[\d+\]", "[]", key), ABSENT)
        # Empty is how TOML writes None, and what it leaves out.
        if value != default and not (default is None and value in ("", [], {})):
            rows.append((key, shown(key, value), ABSENT if default in (ABSENT, None) else shown(key, default)))
    return rows


def differing_settings(runs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return the keys whose values differ between the settings of runs, with the value in each of them."""
    keys = sorted({key for run in runs for key in run if key.removeprefix("controller.") not in DERIVED})
    return [
        (key, [shown(key, run[key]) if key in run else ABSENT for run in runs])
        for key in keys
        if len({json.dumps(run.get(key), default=str, sort_keys=True) if key in run else "" for run in runs}) > 1
    ]


def default_settings() -> dict[str, Any]:
    """Return the default of every setting by its key; that of a member of a list is ``section.list[].setting``."""
    found: dict[str, Any] = {}
    _defaults(Recipe, "", None, found)
    return found


def shown(key: str, value: Any) -> str:
    """Return a value as text, as TOML writes it where that is short; a secret is hidden."""
    if isinstance(value, str):
        text = HIDDEN if value and is_secret(Recipe, key) else without_passwords(value) or '""'
    else:
        text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} ..."


def _flatten(value: Any, key: str, found: dict[str, Any]) -> None:
    if len(found) >= MAX_SETTINGS:
        return
    if key.count(".") > MAX_DEPTH:
        found[key] = "(nested)"
    elif isinstance(value, dict):
        for name, item in value.items():
            _flatten(item, f"{key}.{name}" if key else name, found)
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        for number, item in enumerate(value):
            _flatten(item, f"{key}[{number}]", found)
    else:
        found[key] = value


def _defaults(schema: type[BaseModel], prefix: str, own: BaseModel | None, found: dict[str, Any]) -> None:
    for name, field in schema.model_fields.items():
        key, nested, item = f"{prefix}{name}", section_of(field), item_of(field)
        default = getattr(own, name) if own is not None else field.get_default(call_default_factory=True)
        if nested is not None:
            _defaults(nested, f"{key}.", default if isinstance(default, BaseModel) else None, found)
        elif item is not None:
            found[key] = []
            _defaults(item, f"{key}[].", None, found)
        elif default is not PydanticUndefined:
            try:
                plain = to_jsonable_python(default)
            except PydanticSerializationError:
                plain = str(default)
            if isinstance(plain, dict) and plain:
                _flatten(plain, key, found)
            else:
                found[key] = plain
