"""Search of the settings of all services by key and text."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence

from rich.text import Text

from starling.cli.console import Console
from starling.cli.recipe.schema import Recipe
from starling.common.errors import ConfigError
from starling.common.settings import Setting, iter_settings, nearest


def find_settings(words: Sequence[str]) -> list[Setting]:
    """Return the settings whose key or text has all of `words`; matches of the key come first.

    Raises:
        ConfigError: there is none; the nearest key is named.
    """
    everything = list(iter_settings(Recipe))
    wanted = [word.lower().replace("-", "_").removeprefix("__") for word in words]
    found = [one for one in everything if all(word in f"{one.key} {one.text}".lower() for word in wanted)]
    if not found:
        parts = {part: one.key for one in reversed(everything) for part in (*one.key.split("."), one.key)}
        like = nearest(wanted[0], list(parts))
        hint = f"; did you mean {parts[like]}?" if like else ""
        raise ConfigError(f"no setting has {' and '.join(map(repr, words))} in its key or text{hint}")
    return sorted(found, key=lambda one: not all(word in one.key for word in wanted))


def print_settings(settings: Sequence[Setting], *, as_json: bool) -> None:
    """Print key, type, default and text of each setting."""
    if as_json:
        for one in settings:
            print(json.dumps(one._asdict()))
        return
    console = Console(highlight=False, soft_wrap=True)
    width = max(40, min(console.width, 120))
    for one in settings:
        value = "(required)" if one.default == "required" else f"= {one.default}"
        console.print(Text.assemble((one.key, "bold cyan"), "  ", (one.type, "dim"), "  ", value))
        text = " ".join(one.text.split())
        print(textwrap.fill(text, width, initial_indent="    ", subsequent_indent="    "))
