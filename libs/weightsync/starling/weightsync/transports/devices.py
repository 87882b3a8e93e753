"""Network devices that UCX, NCCL and gloo may use: those of one address, so that they listen nowhere else."""

from __future__ import annotations

import ipaddress
import os
import socket
from functools import cache
from typing import Final

import psutil

from starling.weightsync.transports.endpoints import is_loopback
from starling.weightsync.transports.rdma import active_ports

NCCL_INTERFACE: Final = "NCCL_SOCKET_IFNAME"
"""Variable of the environment that names the interface on which NCCL listens. It is read once in a process."""
_ANY_PORT: Final = 9
"""Of a socket that only asks the kernel for a route."""


@cache
def net_devices(host: str, *, rdma: bool = True) -> str | None:
    """Return UCX's list of the devices that reach `host`, or on which `host` is reached; None for all devices.

    These are the interface of the route to `host`, and all active RDMA ports, unless this UCX has no `rdma`: it would
    warn of devices that it does not know. For a loopback address it is the loopback interface alone.
    """
    if is_loopback(host):
        return "lo"
    interface = interface_to(host)
    if interface is None:
        return None
    return ",".join([interface, *(port.name for port in active_ports() if rdma)])


def choose_interface(host: str, *variables: str) -> None:
    """Let libraries that read these variables of the environment use the interface that reaches `host` only.

    A variable that is set stays. None is set if `host` stands for every address, or has no interface here.
    """
    interface = "lo" if is_loopback(host) else interface_to(host)
    if interface is None:
        return
    for variable in variables:
        if not os.environ.get(variable):
            os.environ[variable] = value_for(variable, interface)


def value_for(variable: str, interface: str) -> str:
    """Return the value by which a library's variable names one interface."""
    # NCCL takes a name for the beginning of names: eth1 also stands for eth10.
    return f"={interface}" if variable == NCCL_INTERFACE else interface


def interface_to(host: str) -> str | None:
    """Return the interface of the route to `host`; None if there is none, or `host` stands for every address."""
    address = local_address_to(host)
    if address is None:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return str(name)
    return None


def local_address_to(host: str) -> str | None:
    """Return the local address from which the kernel would send to `host`: for a local address, that address."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host or "0.0.0.0", _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        if ipaddress.ip_address(str(place[0]).partition("%")[0]).is_unspecified:
            return None
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0]).partition("%")[0]
    except (OSError, ValueError):
        return None
