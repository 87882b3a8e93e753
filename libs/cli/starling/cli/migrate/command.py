"""`starling migrate`: a recipe made of a settings file of NVIDIA Cosmos-RL."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from starling.cli.command_line import define
from starling.common.errors import ConfigError
from starling.common.settings import Tree, read_toml, validate


def migrate(
    settings: Annotated[Path, Parameter(help="A settings file of Cosmos-RL: of training, or of an evaluation.")],
    /,
    *,
    out: Annotated[
        Path | None, Parameter(name=("--out", "-o"), help="The recipe to write; without it, it is printed.")
    ] = None,
) -> int:
    """Translate a settings file of NVIDIA Cosmos-RL into a recipe."""
    from starling.cli.migrate.migration import migrate as migrated
    from starling.common.observe.terminal import printable

    if out is not None and out.exists():
        raise ConfigError(f"{out} exists already; give another name, or remove it")
    tree = read_toml(settings)  # whose errors name the file
    try:
        migration = migrated(tree, settings.stem, load_problem)
    except ConfigError as error:
        raise ConfigError(f"{error} (in {settings})") from None
    for line in migration.report():
        print(printable(line), file=sys.stderr)
    if migration.refusal:
        raise ConfigError(f"nothing can be made of {settings}: {migration.refusal}")
    if out is None:
        print(migration.recipe, end="")
    else:
        out.write_text(migration.recipe)
        print(f"{out} is written; check it with `starling run {out} --dry-run`", file=sys.stderr)
    return 0


def load_problem(recipe: Tree) -> str:
    """Return why the settings classes of a run refuse a recipe; empty if they take it."""
    from starling.cli.recipe.schema import Recipe

    try:
        validate(Recipe, recipe)
    except ConfigError as error:
        return str(error)
    return ""


command = define(
    "migrate",
    migrate,
    "COSMOS.toml [-o RECIPE.toml]",
    "On stderr stands what became of each key: translated, dropped because Starling decides it itself, or not "
    "supported. In the recipe, lines that begin with `# CHECK:` need attention. See "
    "docs/how-to/migrate-from-cosmos-rl.md.",
    """Examples:
  starling migrate grpo.toml -o recipe.toml
  starling run recipe.toml --dry-run""",
)
