"""`starling settings`: search of all settings by name and text, and a recipe with every default."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from starling.cli.command_line import define
from starling.common.errors import ConfigError


def settings(
    *words: Annotated[str, Parameter(help="Show the settings with all of these words in key or text; else all.")],
    toml: Annotated[bool, Parameter(help="Write a recipe with every setting, its default and its text.")] = False,
    json: Annotated[bool, Parameter(help="Print one JSON object per setting instead.")] = False,
) -> int:
    """Search all settings of all services, or write them as a recipe."""
    if toml:
        if words:
            raise ConfigError(f"--toml writes every setting; leave out {words[0]!r}")
        from starling.cli.settings.template import default_recipe

        print(default_recipe(), end="")
        return 0
    from starling.cli.settings.search import find_settings, print_settings

    print_settings(find_settings(words), as_json=json)
    return 0


command = define(
    "settings",
    settings,
    "[WORD ...] [--toml | --json]",
    """Examples:
  starling settings kl
  starling settings rollout timeout
  starling settings --toml > mine.toml""",
)
