"""Launcher of an engine that places some roles only: replicas of the others are processes of this machine."""

from __future__ import annotations

from collections.abc import Collection

from starling.cli.launch.interface import Ended, Launcher, LaunchSite, Placement
from starling.cli.launch.local import LocalLauncher


class PartlyLocalLauncher:
    """Passes each replica on to the launcher of its role."""

    def __init__(self, site: LaunchSite, engine: Launcher, roles: Collection[str]) -> None:
        """`engine` places `roles`."""
        self._local, self._engine, self._roles = LocalLauncher(site), engine, frozenset(roles)
        self._launchers: dict[str, Launcher] = {}
        """Launcher of each replica, by its name."""

    @property
    def leave_s(self) -> float:
        """The longest time of those that have placed a replica."""
        return max((one.leave_s for one in self._launchers.values()), default=self._local.leave_s)

    def start(self, placement: Placement) -> None:
        """Start a replica where its role belongs."""
        launcher = self._engine if placement.role in self._roles else self._local
        self._launchers[placement.name] = launcher
        launcher.start(placement)

    def poll(self) -> list[Ended]:
        """Return the replicas of both that have ended."""
        return [*self._local.poll(), *self._engine.poll()]

    def stop(self, name: str) -> None:
        """Ask a replica to end."""
        if name in self._launchers:
            self._launchers[name].stop(name)

    def close(self) -> None:
        """End all replicas."""
        try:
            self._engine.close()
        finally:
            self._local.close()
