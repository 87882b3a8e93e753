"""The launcher `local`: replicas are child processes of the supervisor, on this machine."""

from __future__ import annotations

import shlex
import signal

from starling.cli.launch.interface import EXIT_S, Ended, LaunchSite, Placement
from starling.cli.run.gpus import FreeGpus
from starling.common.counts import counted
from starling.common.errors import ConfigError


class LocalLauncher:
    """Starts replicas as child processes, which end with the supervisor."""

    def __init__(self, site: LaunchSite) -> None:
        """Start nothing yet."""
        self._site = site
        self._gpus = FreeGpus()
        self._placed: set[str] = set()

    @property
    def leave_s(self) -> float:
        """The exits of processes of this machine are seen at once."""
        return EXIT_S

    def start(self, placement: Placement) -> None:
        """Start its process. Raises ConfigError when too few GPUs are free."""
        children = self._site.children
        self._check_nodes(placement)
        devices = self._gpus.take(placement.name, placement.num_gpus)
        arguments = (*placement.arguments, *self._first_node(placement))
        self._placed.add(placement.name)
        child = children.named(placement.name)
        if child is None:
            children.start(placement.name, placement.role, arguments, environment=devices)
            return
        child.arguments, child.environment = arguments, devices
        children.restart(child)

    def poll(self) -> list[Ended]:
        """Return the replicas that have ended since the last call."""
        ended = []
        for child in self._site.children.all:
            if child.name in self._placed and not child.reported and (code := child.code) is not None:
                child.reported = True
                self._gpus.release(child.name)
                ended.append(Ended(child.name, code, child.ending()))
        return ended

    def stop(self, name: str) -> None:
        """Send SIGTERM to its process."""
        child = self._site.children.named(name)
        if child is not None and child.code is None:
            child.process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """Kill the processes that still run."""
        self._site.children.kill(self._placed)

    def _check_nodes(self, placement: Placement) -> None:
        """Raise ConfigError where another replica of several nodes has the address at which they meet."""
        others = [name for name in self._placed if name.startswith(f"{placement.role}-") and name != placement.name]
        running = [name for name in others if (child := self._site.children.named(name)) and child.code is None]
        if placement.num_nodes > 1 and running:
            raise ConfigError(
                f"the nodes of {running[0]} meet at launch.{placement.role}_rdzv, so {placement.name} cannot be placed "
                "beside it; start it by hand, with an address of its own"
            )

    def _first_node(self, placement: Placement) -> list[str]:
        """Return the flags of the first node of a replica with several, and say how the others are started."""
        num = placement.num_nodes
        if num == 1:
            return []
        launch = self._site.recipe.launch
        rdzv = {"policy": launch.policy_rdzv, "rollout": launch.rollout_rdzv}[placement.role]
        nodes = f"--nnodes {num} --node-rank {{}} --rdzv {rdzv}"
        command = shlex.join(["starling", placement.role, *placement.arguments])
        self._site.say(
            f"{placement.name} waits for {counted(num - 1, 'node')}; on each host: {command} {nodes.format('I')} "
            f"--network.host ITS_ADDRESS, with I = 1{'' if num == 2 else f' to {num - 1}'}"
        )
        return nodes.format(0).split()
