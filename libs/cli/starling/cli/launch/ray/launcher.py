"""The launcher `ray`: each replica is a placement group of an existing cluster, with an actor on each of its nodes.

    supervisor -> driver (`driver.py`) -> actor (`actor.py`) -> agent -> service

Where a replica runs, how many there may be, and which nodes are alive is Ray's business. The configuration and the key
of a replica go to its actor as the argument of a call.
"""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import os
import socket
import time
from typing import Any, Final

from starling.cli.launch.interface import CLOSE_S, EXIT_S, Ended, LaunchError, LaunchSite, Placement
from starling.cli.launch.orders import LOOPBACK, agent_order, check_saving
from starling.cli.launch.ray.ends import exited, lost
from starling.cli.launch.ray.needs import ADDRESS, needs, node_flags, shown
from starling.cli.launch.ray.process import DriverProcess
from starling.cli.launch.ray.replica import ENDING_S
from starling.common.counts import counted
from starling.common.errors import ConfigError
from starling.common.files import open_own
from starling.common.observe.terminal import printable

CONNECT_S: Final = 120.0
"""How long the connection to the cluster may take."""
LISTENS_S: Final = 10.0
"""How long its port may take to accept a connection."""
LOG: Final = "ray"
"""Name of the driver's log."""


class RayLauncher:
    """Places replicas under actors of Ray."""

    def __init__(self, site: LaunchSite) -> None:
        """Connect, and start nothing yet.

        Raises:
            ConfigError: the recipe does not suit.
            LaunchError: Ray is not installed, or there is no cluster at the address.
        """
        self._site, self._settings = site, site.recipe.launch.ray
        if importlib.util.find_spec("ray") is None:
            raise LaunchError("launch.launcher = 'ray', and Ray is not installed here; install starling-cli[ray]")
        if site.recipe.launch.colocate:
            raise ConfigError(
                "launch.colocate = true with launch.launcher = 'ray': policies and rollouts that share devices have to "
                "be on one machine; remove one of the two"
            )
        if "policy" in self._settings.roles and not self._settings.shared:
            check_saving(site, "a node of Ray", "set launch.ray.shared = true if the nodes have the folder of the run")
        self._placed: dict[str, Placement] = {}
        """Replicas that have not ended."""
        self._waiting: set[str] = set()
        """Replicas of which the user knows that they wait for nodes."""
        self._nodes_told: set[str] = set()
        """Nodes of whose niceness the user knows."""
        check_listens(self._settings.address)
        self._driver: DriverProcess | None = self._connect()
        self._check_reachable(self._await_ready(self._driver))

    @property
    def leave_s(self) -> float:
        """The driver gives the nodes of a replica `ENDING_S` after the first of them, and tells the end then."""
        return EXIT_S + ENDING_S

    def start(self, placement: Placement) -> None:
        """Ask for the nodes of a replica; it starts when Ray has them. Raises LaunchError."""
        if self._driver is None or self._driver.code is not None:
            self._driver = self._connect()
        orders = [
            agent_order(self._site, placement, shared=self._settings.shared, address=ADDRESS, more=flags)
            for flags in node_flags(placement)
        ]
        wanted = needs(placement, self._settings)
        self._driver.send("start", name=placement.name, needs=wanted, orders=orders, python=self._settings.python)
        self._placed[placement.name] = placement

    def poll(self) -> list[Ended]:
        """Return the replicas that have ended since the last call, and take what else the driver says."""
        driver = self._driver
        if driver is None:
            return []
        is_gone = driver.code is not None
        ended = self._take(driver.rest() if is_gone else driver.told())
        if is_gone:
            self._driver = None
            reason = f"with the connection to Ray; see {self._site.attempt.logs / f'{LOG}.log'}"
            ended += [lost(name, "", reason) for name in self._placed]
            self._placed.clear()
        return ended

    def stop(self, name: str) -> None:
        """Ask a replica to end: SIGTERM; one that waits for nodes is given up."""
        if name in self._placed and self._driver is not None:
            self._driver.send("stop", name=name)

    def close(self) -> None:
        """End all replicas and the driver, with whom all that is left of them in Ray goes."""
        driver, deadline = self._driver, time.monotonic() + CLOSE_S
        if driver is None:
            return
        driver.send("close")
        while driver.code is None and time.monotonic() < deadline:
            self._take(driver.told(0.1))
        driver.kill()
        self._take(driver.rest())

    # --- the driver ------------------------------------------------------------------------------------------------

    def _connect(self) -> DriverProcess:
        """Start a driver. Raises LaunchError."""
        logs = self._site.attempt.logs
        try:
            logs.mkdir(parents=True, exist_ok=True)
            return DriverProcess(self._settings.address, logs / f"{LOG}.log")
        except OSError as error:
            raise LaunchError(f"the driver of Ray cannot be started ({error.strerror})") from None

    def _await_ready(self, driver: DriverProcess) -> list[str]:
        """Return the addresses of the cluster's nodes. Raises LaunchError."""
        address, deadline = self._settings.address, time.monotonic() + CONNECT_S
        where = no_cluster(address)
        while time.monotonic() < deadline:
            is_gone = driver.code is not None
            for line in driver.rest() if is_gone else driver.told(0.1):
                if line["kind"] == "ready":
                    found: list[str] = line["nodes"]
                    return found
                if line["kind"] == "failed":
                    raise LaunchError(f"{where} ({printable(line['text'])[:400]}); start one, or set the address")
            if is_gone:
                raise LaunchError(f"{where}, or it ended the connection; see {self._site.attempt.logs / f'{LOG}.log'}")
        driver.kill()
        raise LaunchError(f"{where} that answers within {CONNECT_S:g} s; check that it runs, or set the address")

    def _check_reachable(self, nodes: list[str]) -> None:
        """Raise ConfigError when replicas on other nodes could not reach the controller."""
        host = self._site.recipe.network.host
        away = [node for node in nodes if not _is_loopback(node)]
        if away and host in LOOPBACK:
            assert self._driver is not None
            self._driver.kill()
            raise ConfigError(
                f"network.host = {host!r} cannot be reached from {away[0]}; set it to the address of this machine in "
                "the network of the cluster"
            )

    # --- what it says ----------------------------------------------------------------------------------------------

    def _take(self, lines: list[dict[str, Any]]) -> list[Ended]:
        """Take the driver's lines, and return the ends in them."""
        ended = []
        for line in lines:
            name = line.get("name", "")
            if name not in self._placed:
                continue  # `ready`, after a new start of the driver
            if line["kind"] == "waits":
                self._say_waiting(self._placed[name])
            elif line["kind"] == "placed":
                self._say_placed(name, line["nodes"], line["niceness"])
            elif line["kind"] == "lines":
                self._write(name, line)
            elif line["kind"] == "ended":
                del self._placed[name]
                self._waiting.discard(name)
                ended.append(self._end(name, line))
        return ended

    def _end(self, name: str, line: dict[str, Any]) -> Ended:
        node, last_line = printable(line["node"]), printable(line["last_line"])[:300]
        if line["lost"]:
            return lost(name, node, printable(line["lost"]))
        return exited(name, 0 if line["code"] is None else int(line["code"]), node, last_line)

    def _say_waiting(self, placement: Placement) -> None:
        if placement.name not in self._waiting:
            self._waiting.add(placement.name)
            self._site.say(f"{placement.name} waits in Ray for {shown(needs(placement, self._settings))}")

    def _say_placed(self, name: str, nodes: list[str], niceness: list[int]) -> None:
        """Say where a replica is, and of each node once that its processes are started with little priority."""
        self._waiting.discard(name)
        self._site.say(f"{name} is placed on {', '.join(nodes)}")
        for node, nice in zip(nodes, niceness, strict=True):
            if nice > 0 and node not in self._nodes_told:
                self._nodes_told.add(node)
                self._site.say(
                    f"Ray raises the niceness of processes on {node} by {nice}, so that all others come first; set "
                    "RAY_worker_niceness=0 where `ray start` runs"
                )

    def _write(self, name: str, line: dict[str, Any]) -> None:
        """Append lines of a replica to its log; a full disk ends nothing."""
        node = int(line["node"])
        path = self._site.attempt.logs / f"{name}{f'.node-{node}' if node else ''}.log"
        lines = [printable(text) for text in line["lines"]]
        if line["left_out"]:
            lines.insert(0, f"[{counted(int(line['left_out']), 'line')} left out: the actor keeps the newest]")
        with contextlib.suppress(OSError):
            descriptor = open_own(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            with os.fdopen(descriptor, "a") as file:
                file.write("".join(f"{text}\n" for text in lines))


def check_listens(address: str) -> None:
    """Raise LaunchError when nothing listens at an address with a port: Ray itself tries for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=LISTENS_S).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LaunchError(f"{no_cluster(address)} ({reason}); start one, or set the address") from None


def no_cluster(address: str) -> str:
    """Return the beginning of the sentence about a wrong address."""
    return f"there is no cluster of Ray at launch.ray.address = {address!r}"


def _is_loopback(node: str) -> bool:
    try:
        return ipaddress.ip_address(node).is_loopback
    except ValueError:
        return False
