"""RDMA ports of this host, as the kernel lists them, and why weights do not use one that is active."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

from starling.weightsync.offers.offer import Transport, TransportChoice

SYSFS: Final = Path("/sys/class/infiniband")
"""Where the kernel lists RDMA devices."""
_LONGEST_ATTRIBUTE: Final = 64
_OVER_TCP: Final = ("tcp", "ucx", "gloo")
"""Transports that send over TCP where they have nothing better."""


class RdmaPort(NamedTuple):
    """One port of an RDMA device."""

    device: str
    """Name of the device, such as ``mlx5_0``."""
    number: str
    link_layer: str
    """``InfiniBand``, or ``Ethernet`` for RoCE; empty where the kernel does not say it."""
    rate: str
    """As the kernel writes it, such as ``400 Gb/sec (4X NDR)``; empty where it does not."""
    active: bool
    """Whether its link is up."""

    @property
    def name(self) -> str:
        """Name of the port as UCX writes it."""
        return f"{self.device}:{self.number}"

    def __str__(self) -> str:
        kind = {"Ethernet": "RoCE"}.get(self.link_layer, self.link_layer)
        said = ", ".join(filter(None, (kind, self.rate)))
        return f"{self.name} ({said})" if said else self.name


def active_ports(root: Path = SYSFS) -> tuple[RdmaPort, ...]:
    """Return the RDMA ports of this host whose link is up, by name; none where the kernel knows no RDMA.

    Args:
        root: where the devices are listed, each with a folder ``ports/<number>`` of attributes.
    """
    ports = [_port(root, device, number) for device in _entries(root) for number in _entries(root / device / "ports")]
    return tuple(port for port in ports if port.active)


def unused_rdma(
    transport: Transport, choice: TransportChoice, *, encrypt: bool | None, has_rdma: bool, root: Path = SYSFS
) -> str:
    """Return why weights leave this host over TCP although it has an active RDMA port, and what changes that.

    Args:
        transport: the transport in use between hosts.
        choice: the setting that it follows from.
        encrypt: as in `endpoints.choose_transport`.
        has_rdma: whether the UCX that is installed here can use RDMA.
        root: as in `active_ports`.

    Returns: a sentence; empty if they use RDMA, or there is no active port.
    """
    ports = active_ports(root)
    if not ports or transport not in _OVER_TCP or (transport == "ucx" and has_rdma):
        return ""
    if encrypt:
        remedy = "RDMA cannot encrypt them, which network.encrypt_weights = true requires"
    elif choice == "auto" and encrypt is None:
        remedy = "RDMA cannot encrypt them: on a private network set network.encrypt_weights = false"
    elif choice in ("auto", "ucx"):
        remedy = "no UCX with RDMA is installed here: install one, or install NIXL and choose 'nixl'"
    else:
        remedy = f"transport {choice!r} was chosen: choose 'auto' or 'ucx'"
    return f"weights travel over TCP beside the RDMA port {ports[0]}: {remedy}"


def _port(root: Path, device: str, number: str) -> RdmaPort:
    folder = root / device / "ports" / number
    state = _attribute(folder / "state")  # as in "4: ACTIVE"
    return RdmaPort(
        device, number, _attribute(folder / "link_layer"), _attribute(folder / "rate"), state.partition(":")[0] == "4"
    )


def _attribute(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_LONGEST_ATTRIBUTE).decode("ascii", "replace").strip()
    except OSError:
        return ""


def _entries(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
