"""Texts that get into files which other users can read: no secret may be in them."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from typing import Any

from starling.cli.recipe.schema import Recipe
from starling.common.errors import ConfigError
from starling.common.secret_settings import is_secret, without_secrets
from starling.common.settings import ENV_PREFIX


def check_readable(settings: Iterable[str]) -> None:
    """Raise ConfigError when a setting that was given as a flag is secret, or has a secret in it."""
    for setting in settings:
        flag, _, value = setting.partition("=")
        key = flag.removeprefix("--").replace("-", "_")
        if is_secret(Recipe, key) or _has_secret(key, value):
            variable = f"STARLING_{key.upper().replace('.', '__')}"
            raise ConfigError(
                f"{flag} has a secret, which others could read in the script; give it in the recipe, or by {variable}"
            )


def variable_has_secret(name: str, text: str) -> bool:
    """Return whether a variable of the environment is a setting that is secret, or a section in JSON with one."""
    if not name.upper().startswith(ENV_PREFIX):
        return False
    path = tuple(name[len(ENV_PREFIX) :].lower().split("__"))
    if is_secret(Recipe, path):
        return True
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return bool(without_secrets(Recipe, found, path) != found)


def _has_secret(key: str, value: str) -> bool:
    try:
        found: Any = tomllib.loads(f"value = {value}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return False
    return bool(without_secrets(Recipe, found, tuple(key.split("."))) != found)
