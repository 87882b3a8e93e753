"""What the agent on another machine (`starling.cli.launch.agent`) gets to run a replica: one line of JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from starling.cli.launch.agent import FOLDER
from starling.cli.launch.interface import LaunchSite, Placement
from starling.cli.run.environment import of_services
from starling.common.errors import ConfigError

OFFERING: Final = ("policy", "rollout")
"""Roles from which others read weights, at the address of their host."""
LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")


def agent_order(
    site: LaunchSite,
    placement: Placement,
    *,
    shared: bool,
    address: str,
    environment: Mapping[str, str] | None = None,
    more: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the order for a replica.

    Args:
        site: the run.
        placement: of the replica.
        shared: the run's folder is on the other machine, too, under the same path.
        address: of that machine in the network of the run.
        environment: variables of the replica, besides those of all.
        more: further flags.
    """
    attempt = site.attempt
    folder = str(attempt.folder) if shared else f"{FOLDER}/run"
    arguments = ["--config", f"{FOLDER}/config.toml", "--dir", folder, "--name", placement.name]
    arguments += ["--controller", placement.controller]
    files = {"config.toml": attempt.config.read_text()}
    if site.recipe.network.curve:
        files["key.json"] = attempt.key(placement.name).read_text()
        arguments += ["--key", f"{FOLDER}/key.json"]
    if placement.role in OFFERING:
        arguments.append(f"--network.host={address}")
    return {
        "name": placement.name,
        "role": placement.role,
        "arguments": [*arguments, *more, *placement.settings],
        "environment": {**of_services(site.recipe.launch.num_threads), **(environment or {})},
        "files": files,
    }


def check_saving(site: LaunchSite, where: str, remedy: str) -> None:
    """Raise ConfigError for a policy that could not save its states, since `where` it is has no folder of the run."""
    recipe = site.recipe
    if "policy" in recipe.replicas and recipe.kind.trains and not recipe.policy.saving.folder:
        raise ConfigError(
            f"a policy on {where} could not save its states; {remedy}, or policy.saving.folder to an object store"
        )
