"""The hosts of the launcher `ssh`, and which of them a replica is placed on.

This is bookkeeping, no scheduler: the first host with enough free GPUs of the kind takes a replica, and one without
GPUs goes to the host with the fewest replicas. A host that was lost comes last for a while.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pydantic import Field

from starling.cli.launch.interface import LaunchError, Placement
from starling.common.counts import counted
from starling.common.ranges import MAX_PROCESSES
from starling.common.settings import SettingsSection

LOST_S: Final = 120.0
"""How long a host that was lost gets replicas only if no other one can."""


class HostSettings(SettingsSection):
    """A machine that is reached by ssh."""

    host: str = Field(min_length=1, pattern="^[^-]")
    """As ssh takes it: a name of its configuration, `HOST`, or `USER@HOST`."""
    address: str = ""
    """Its address in the network of the run, at which others read weights from it; by default that of `host`."""
    gpus: int = Field(default=0, ge=0, le=MAX_PROCESSES)
    """Its GPUs."""
    gpu_kind: str = ""
    """Their kind, for `rollout.pools.gpu_kind`."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Its labels, for `rollout.pools.node_selector`."""
    python: str = "python3"
    """Interpreter with an installation of Starling, of the same version as here."""
    shared: bool = False
    """The folder of the run is there, too, under the same path. A policy needs it, or `policy.saving.folder`."""

    @property
    def own_address(self) -> str:
        """Its address in the network of the run."""
        return self.address or self.host.rpartition("@")[2]

    @property
    def is_here(self) -> bool:
        """Whether its address is one of the loopback interface."""
        try:
            return ipaddress.ip_address(self.own_address).is_loopback
        except ValueError:
            return self.own_address == "localhost"

    def fits(self, placement: Placement) -> bool:
        """Return whether it is of the kind that `placement` asks for."""
        is_kind = placement.gpu_kind in ("", self.gpu_kind)
        return is_kind and all(self.labels.get(key) == value for key, value in placement.node_selector.items())


@dataclass
class HostUse:
    """A host and what is on it."""

    settings: HostSettings
    placed: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """GPUs of each replica, by name."""
    lost_at: float = float("-inf")

    def free_gpus(self) -> list[int]:
        """Return the GPUs that no replica has."""
        taken = {gpu for gpus in self.placed.values() for gpu in gpus}
        return [gpu for gpu in range(self.settings.gpus) if gpu not in taken]


def choose(hosts: Sequence[HostUse], placement: Placement, now: float) -> HostUse:
    """Return the host for a replica, with its GPUs taken. Raises LaunchError when none fits."""
    fitting = [host for host in hosts if host.settings.fits(placement)]
    if not fitting:
        wanted = [placement.gpu_kind, *(f"{key} = {value}" for key, value in placement.node_selector.items())]
        raise LaunchError(f"no host of launch.hosts is of the kind {', '.join(filter(None, wanted))}; add one")
    able = [host for host in fitting if len(host.free_gpus()) >= placement.num_gpus]
    if not able:
        free = max(len(host.free_gpus()) for host in fitting)
        raise LaunchError(
            f"{placement.name} needs {counted(placement.num_gpus, 'GPU')}, and the most that one host of launch.hosts "
            f"has free are {free}; add a host, or scale something down"
        )
    chosen = min(able, key=lambda host: (now - host.lost_at < LOST_S, 0 if placement.num_gpus else len(host.placed)))
    chosen.placed[placement.name] = tuple(chosen.free_gpus()[: placement.num_gpus])
    return chosen


def visible(gpus: Sequence[int]) -> Mapping[str, str]:
    """Return the environment with these GPUs; empty for none, where a replica sees all of them."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {}
