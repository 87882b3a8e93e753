"""Detection of this machine's topology from the operating system. The only part of planning that does I/O."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

from starling.weightsync.plan.topology import HostSpec, Nic, Topology


def detect_topology(root: Path = Path("/")) -> Topology:
    """Return this host: its NUMA nodes, NVIDIA GPUs and network cards with their line rates.

    InfiniBand and RoCE ports if there are any, else Ethernet cards that are up. A rate that the system does not report
    (of a virtual card) is left at the topology's default.

    Args:
        root: where the system's files are; another folder in tests.
    """
    sys = root / "sys"
    numas = len(list((sys / "devices/system/node").glob("node[0-9]*")))
    gpus = len(list((root / "proc/driver/nvidia/gpus").glob("*")))
    nics = _infiniband(sys) or _ethernet(sys)
    return Topology(hosts=(HostSpec(name=_hostname(root), gpus=min(gpus, 1024), numas=max(numas, 1), nics=nics),))


def _hostname(root: Path) -> str:
    return socket.gethostname() if root == Path("/") else root.name


def _infiniband(sys: Path) -> tuple[Nic, ...]:
    """Return each active port; a rate has the form `400 Gb/sec (4X NDR)`."""
    nics: list[Nic] = []
    for port in sorted((sys / "class/infiniband").glob("*/ports/*")):
        rate = re.match(r"([\d.]+) Gb", _text(port / "rate"))
        if rate is not None and float(rate[1]) > 0 and "ACTIVE" in _text(port / "state"):
            number = len(nics)
            nics.append(Nic(name=f"{port.parts[-3]}:{port.name}", rail=f"rail-{number}", gb_per_s=float(rate[1]) / 8))
    return tuple(nics)


def _ethernet(sys: Path) -> tuple[Nic, ...]:
    """Return each physical card that is up; its speed is in Mbit/s, or -1, or unreadable."""
    nics: list[Nic] = []
    for card in sorted((sys / "class/net").glob("*")):
        speed = _text(card / "speed")
        if (card / "device").exists() and _text(card / "operstate") == "up" and speed.isdecimal() and int(speed):
            nics.append(Nic(name=card.name, gb_per_s=int(speed) / 8000))
    return tuple(nics)


def _text(path: Path) -> str:
    """Return a file's text, empty if it cannot be read, as the speed of a card that is down."""
    try:
        return os.fsdecode(path.read_bytes()).strip()
    except OSError:
        return ""
