"""The launcher `ssh`: replicas run on the hosts of `launch.hosts`, each under an agent at the other end of an ssh.

    supervisor -> ssh HOST python -m starling.cli.launch.agent -> service

The configuration and the replica's key go through stdin of ssh, so nothing of the run has to be on the host but the
installation and the model's folder. The output comes back through its stdout, into ``logs/NAME.log``. When this process
ends, in whatever way, so does ssh, the agent sees the end of its stdin, and the service ends. When the host or the
network is lost, ssh notices it within `ALIVE_S`, and the replica counts as killed: it is started again, on another host
if there is one.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from typing import Final

from starling.cli.launch.agent import STOP
from starling.cli.launch.hosts import HostUse, choose, visible
from starling.cli.launch.interface import CLOSE_S, EXIT_S, Ended, LaunchError, LaunchSite, Placement
from starling.cli.launch.orders import LOOPBACK, agent_order, check_saving
from starling.cli.run.processes import ServiceProcess
from starling.common.errors import ConfigError
from starling.common.observe.process import EXIT_USAGE

ALIVE_S: Final = 15
"""A host that answers nothing for this long is lost."""
OPTIONS: Final = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ClearAllForwardings=yes"),
    *("-o", f"ServerAliveInterval={ALIVE_S // 3}", "-o", "ServerAliveCountMax=3", "-o", "LogLevel=ERROR"),
)
SSH_FAILED: Final = 255
"""Exit code of ssh when it could not connect, or lost the connection."""
NOT_FOUND: Final = (126, 127)
"""Exit codes of a shell that cannot run a command."""
BY_SIGNAL: Final = 128
"""Base of the exit codes of an agent whose service was killed by a signal."""


class SshLauncher:
    """Starts replicas on other machines by ssh."""

    def __init__(self, site: LaunchSite) -> None:
        """Start nothing yet. Raises ConfigError when the recipe does not suit, LaunchError without ssh."""
        self._site = site
        launch = site.recipe.launch
        if shutil.which("ssh") is None:
            raise LaunchError("launch.launcher = 'ssh', and there is no ssh here; install it, as openssh-client")
        if not launch.hosts:
            raise ConfigError("launch.launcher = 'ssh' needs hosts; add [[launch.hosts]] with the key host")
        if launch.colocate:
            raise ConfigError(
                "launch.colocate = true with launch.launcher = 'ssh': policies and rollouts that share devices have to "
                "be on one machine; remove one of the two"
            )
        if max(launch.policy_nodes, launch.rollout_nodes) > 1:
            raise ConfigError(
                "the launcher ssh starts replicas of one node; set launch.policy_nodes and launch.rollout_nodes to 1, "
                "or choose a launcher of a cluster"
            )
        self._hosts = [HostUse(host) for host in launch.hosts]
        away = [use.settings.host for use in self._hosts if not use.settings.is_here]
        if away and site.recipe.network.host in LOOPBACK:
            raise ConfigError(
                f"network.host = {site.recipe.network.host!r} cannot be reached from {away[0]}; set it to the address "
                "of this machine in their network"
            )
        alone = [use.settings.host for use in self._hosts if not use.settings.shared]
        if alone:
            check_saving(site, alone[0], "set shared = true for hosts that have the folder of the run")

    @property
    def leave_s(self) -> float:
        """An exit comes over the connection; one that is lost counts as such after `ALIVE_S`."""
        return EXIT_S + ALIVE_S

    def start(self, placement: Placement) -> None:
        """Start the agent of a replica. Raises LaunchError when no host fits."""
        self._release(placement.name)
        use = choose(self._hosts, placement, time.monotonic())
        children = self._site.children
        command = ("ssh", *OPTIONS, *self._site.recipe.launch.ssh_options, "--", use.settings.host)
        command += (use.settings.python, "-m", "starling.cli.launch.agent")
        child = children.named(placement.name)
        if child is None:
            children.start_command(placement.name, placement.role, command, self._order(placement, use))
        else:
            child.command, child.stdin = command, self._order(placement, use)
            children.restart(child)
        self._site.say(f"{placement.name} is placed on {use.settings.host}")

    def _order(self, placement: Placement, use: HostUse) -> bytes:
        """Return the line by which the agent knows what to run."""
        host = use.settings
        order = agent_order(
            self._site,
            placement,
            shared=host.shared,
            address=host.own_address,
            environment=visible(use.placed[placement.name]),
        )
        return json.dumps(order).encode() + b"\n"

    def poll(self) -> list[Ended]:
        """Return the replicas that have ended since the last call."""
        ended = []
        for use in self._hosts:
            for name in list(use.placed):
                child = self._site.children.named(name)
                if child is not None and not child.reported and (code := child.code) is not None:
                    child.reported = True
                    ended.append(self._end(use, child, code))
                    del use.placed[name]
        return ended

    def _end(self, use: HostUse, child: ServiceProcess, code: int) -> Ended:
        host, name = use.settings.host, child.name
        if child.reader is not None:
            child.reader.join(1.0)
        last = next((line for line in reversed(child.last_lines) if line.strip()), "no reason was given")
        if code == SSH_FAILED or code < 0:
            use.lost_at = time.monotonic()
            return Ended(name, None, f"was lost with its connection to {host} ({last})")
        if code in NOT_FOUND:
            return Ended(name, EXIT_USAGE, f"could not be started on {host} ({last}); set python of this host")
        if code > BY_SIGNAL:
            number = code - BY_SIGNAL
            return Ended(name, -number, f"was killed by {_signal_name(number)} on {host}")
        return Ended(name, code, f"exited with code {code} on {host}")

    def stop(self, name: str) -> None:
        """Ask the agent of a replica to end its service."""
        child = self._site.children.named(name)
        if child is not None:
            child.write(f"{STOP}\n".encode())

    def close(self) -> None:
        """Close stdin of all agents, which then end, and wait for them."""
        placed = [name for use in self._hosts for name in use.placed]
        children = [child for name in placed if (child := self._site.children.named(name)) is not None]
        for child in children:
            child.close_stdin()
        deadline = time.monotonic() + CLOSE_S
        while any(child.code is None for child in children) and time.monotonic() < deadline:
            time.sleep(0.05)
        self._site.children.kill(placed)

    def _release(self, name: str) -> None:
        for use in self._hosts:
            use.placed.pop(name, None)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
