"""The launchers by name: each is one class, whose only argument is the `LaunchSite`."""

from __future__ import annotations

import importlib
from typing import Final, cast

from starling.cli.launch.interface import Launcher, LaunchSite
from starling.common.errors import ConfigError
from starling.common.settings import nearest

LOCAL: Final = "local"
LAUNCHERS: Final = {
    LOCAL: "starling.cli.launch.local:LocalLauncher",
    "ssh": "starling.cli.launch.ssh:SshLauncher",
    "slurm": "starling.cli.launch.slurm:SlurmLauncher",
    "kubernetes": "starling.cli.launch.kubernetes.launcher:KubernetesLauncher",
    "ray": "starling.cli.launch.ray.launcher:RayLauncher",
}
"""Modules and classes by name. A module is imported by the run that uses it, and by no other."""


def check_launcher(name: str) -> str:
    """Return `name`. Raises ConfigError when there is no launcher of this name."""
    if name not in LAUNCHERS:
        like = nearest(name, sorted(LAUNCHERS))
        hint = f"; did you mean {like!r}?" if like else ""
        raise ConfigError(f"there is no launcher {name!r}; choose one of {', '.join(sorted(LAUNCHERS))}{hint}")
    return name


def make_launcher(name: str, site: LaunchSite) -> Launcher:
    """Return the launcher `name` for a run.

    Raises:
        ConfigError: there is no such launcher, or the recipe does not suit it.
        LaunchError: its engine is not here.
    """
    module, _, class_name = LAUNCHERS[check_launcher(name)].partition(":")
    launcher = cast(Launcher, getattr(importlib.import_module(module), class_name)(site))
    engine = getattr(site.recipe.launch, name, None)
    if engine is None or not hasattr(engine, "roles"):
        return launcher
    from starling.cli.launch.partly_local import PartlyLocalLauncher

    return PartlyLocalLauncher(site, launcher, engine.roles)
