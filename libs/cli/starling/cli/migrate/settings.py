"""Tables of the settings of Cosmos-RL: type, default, and what becomes of each in a recipe.

There are three forms of files. `training`: of the present trainer. `evaluation`: files with `num_gpus`. `generators`:
older files for generators of videos. The tables are TOML beside this module, one line per setting; a path has dots, and
`[]` after the name of a list of tables. `starling.cli.migrate.page` writes them into the documentation.
"""

from __future__ import annotations

import enum
import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Final


class Form(enum.StrEnum):
    """Which files of Cosmos-RL have a setting."""

    TRAINING = "training"
    EVALUATION = "evaluation"
    GENERATORS = "generators"


class Outcome(enum.StrEnum):
    """What becomes of a setting."""

    TRANSLATED = "translated"
    """It becomes settings of the recipe, which the text names."""
    DROPPED = "dropped"
    """Starling decides it itself, as the text says."""
    UNSUPPORTED = "unsupported"
    """Starling does not have it."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of Cosmos-RL."""

    path: str
    types: tuple[str, ...]
    """`bool`, `int`, `float`, `str`, `list`, `dict`; `any` for a value that is not looked at."""
    default: Any
    """None for none, and for a section."""
    outcome: Outcome
    text: str
    """The settings of the recipe, or one sentence."""
    least: float | None = None
    """Minimum of a number; None for none."""
    choices: tuple[str, ...] = ()
    """Values that a text may have; empty for any."""
    items: Mapping[str, str] = field(default_factory=dict)
    """Type of the items, of values that are a `list` or a `dict`."""


Table = Mapping[str, Setting]

TYPES: Final[dict[str, tuple[type, ...]]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (float, int),
    "str": (str,),
    "list": (list,),
    "dict": (dict,),
}
NAMES: Final = {
    "bool": "true or false",
    "int": "an integer",
    "float": "a number",
    "str": "text",
    "list": "a list",
    "dict": "a table",
}


@functools.cache
def table(form: Form) -> Table:
    """Return the settings of one form of files, by path."""
    text = (resources.files(__package__) / "tables" / f"{form}.toml").read_text()
    found = {}
    for section, settings in tomllib.loads(text).items():
        for name, row in settings.items():
            path = f"{section}.{name}" if section else name
            outcome = next(outcome for outcome in Outcome if outcome in row)
            types, choices = tuple(row["type"].split(" | ")), tuple(row.get("choices", ()))
            limits = (row.get("least"), choices, row.get("items", {}))
            found[path] = Setting(path, types, row.get("default"), outcome, row[outcome], *limits)
    return found
