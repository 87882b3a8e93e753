"""`starling prepare`: everything that the services of a run read, without starting one."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from starling.cli.command_line import Line, define

if TYPE_CHECKING:
    from starling.cli.run.attempt import Attempt


def prepare(
    recipe: Annotated[Path, Parameter(help="The recipe of the run.")],
    /,
    *,
    dir: Annotated[Path, Parameter(help="The folder of the run, which is made if it does not exist.")],
    models: Annotated[
        Path | None,
        Parameter(metavar="DIR", help="Where the model of [model.scratch] goes; else to the run's folder."),
    ] = None,
    policies: Annotated[int, Parameter(help="Policies that get a key; default: those of the recipe.")] = 0,
    rollouts: Annotated[int, Parameter(help="Rollouts that get a key; default: those of the recipe.")] = 0,
    rewards: Annotated[int, Parameter(help="Reward replicas that get a key; default: those of the recipe.")] = 0,
    teachers: Annotated[int, Parameter(help="Teachers that get a key; default: those of the recipe.")] = 0,
    line: Line,
) -> int:
    """Write keys and configuration of a run whose services are started one by one, and start nothing."""
    # transformers writes a model's files without torch, whose import would take most of the time; it warns of that.
    sys.modules["torch"] = None  # type: ignore[assignment]
    logging.disable(logging.WARNING)
    from starling.cli.prepare import folder
    from starling.cli.recipe.schema import load_recipe
    from starling.cli.run.attempt import Attempt

    loaded = load_recipe([recipe], line.settings)
    counts = {"policy": policies, "rollout": rollouts, "reward": rewards, "teacher": teachers}
    attempt = Attempt.create_at(dir)
    is_new = not attempt.config.exists()
    names = folder.replica_names(loaded, counts)
    made = folder.prepare(loaded, attempt, names, models)
    print(f"{attempt.config} is {'written' if is_new else 'there already, and left as it is'}")
    print(f"{attempt.folder / 'keys'} has a key for each of {', '.join(names)}; new: {', '.join(made) or 'none'}")
    if is_new:
        _print_commands(attempt, names)
    return 0


def _print_commands(attempt: Attempt, names: list[str]) -> None:
    """Print how the services are started."""
    common = f"--config {attempt.config} --dir {attempt.folder}"
    print(f"start: starling controller {common}")
    for name in names:
        role = name.partition("-")[0]
        print(f"       starling {role} {common} --name {name} --controller tcp://HOST:PORT")


command = define(
    "prepare",
    prepare,
    "RECIPE.toml --dir FOLDER [OPTIONS] [--SECTION.KEY VALUE ...]",
    """Examples:
  starling prepare grpo.toml --dir run --network.host 10.0.0.1 --network.port 5555
  starling prepare grpo.toml --dir run --rollouts 16      # keys of further rollouts""",
)
