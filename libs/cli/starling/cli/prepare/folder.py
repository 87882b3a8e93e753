"""The folder of a run that is prepared and not started: keys, recipe, configuration, and the model of [model.scratch].

systemd, compose, a scheduler, or people start the services, each with ``--config RUN/config.toml`` and its key. Files
that exist are left as they are, so that preparing may be repeated: also to make the keys of further replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from starling.cli.model.scratch import make_model_folder
from starling.cli.recipe.schema import MODEL_FOLDER, Recipe, resolved, to_toml
from starling.cli.run.attempt import OBSERVER, OPERATOR, Attempt
from starling.common.files import write_whole
from starling.common.net.curve import ALLOWED
from starling.common.net.keyring import list_keys, make_keys
from starling.common.settings import complete_toml

COUNTS = {"policy": "num_policies", "rollout": "num_rollouts", "reward": "num_rewards", "teacher": "num_teachers"}
"""Settings of the controller with the number of replicas that a run waits for, by role."""


def replica_names(recipe: Recipe, counts: Mapping[str, int]) -> list[str]:
    """Return the names of the replicas of a run.

    Args:
        recipe: says how many of each role this machine, and others, bring.
        counts: numbers that replace those of the recipe, by role.
    """
    wanted = {role: max(num, getattr(recipe.controller, COUNTS[role])) for role, num in recipe.replicas.items()}
    wanted |= {role: num for role, num in counts.items() if num}
    return [f"{role}-{number}" for role, num in wanted.items() for number in range(num)]


def prepare(recipe: Recipe, attempt: Attempt, names: list[str], models: Path | None) -> list[str]:
    """Write what the services of a run read, where it is not there yet. Returns the names whose keys were made.

    Args:
        recipe: of the run.
        attempt: whose folder exists.
        names: of replicas that need a key.
        models: folder for the model of [model.scratch]; None for the folder of the run.

    Raises:
        ConfigError: something cannot be written.
    """
    attempt.check_folders()
    missing = make_missing_keys(attempt.folder / "keys", [*names, OBSERVER, OPERATOR])
    if attempt.config.exists():
        return missing
    config = resolved(recipe, attempt.folder.parent / recipe.run.name / attempt.folder.name)
    if recipe.model.scratch is not None:
        path = attempt.folder / MODEL_FOLDER if models is None else models / f"scratch-{recipe.run.name}"
        make_model_folder(recipe.model.scratch, path.absolute())
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(path.absolute())})})
    write_whole(attempt.recipe, complete_toml(to_toml(recipe)))
    write_whole(attempt.config, complete_toml(to_toml(config)))
    return missing


def make_missing_keys(folder: Path, names: list[str]) -> list[str]:
    """Make a key for each name that has none, and return these names."""
    known = {entry.name for entry in list_keys(folder)} if (folder / ALLOWED).exists() else set()
    missing = [name for name in names if name not in known]
    if missing:
        make_keys(folder, missing, replace=not known)  # the keys of an interrupted start
    return missing
