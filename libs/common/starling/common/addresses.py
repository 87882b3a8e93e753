"""Addresses at which servers listen: ``host:port``, and whether others can reach them."""

from __future__ import annotations

import ipaddress
from typing import Final

from starling.common.errors import ConfigError

MAX_PORT: Final = 65535
ROLE_PORTS: Final = {"controller": 0, "policy": 100, "rollout": 200, "reward": 300, "teacher": 400}
"""What is added to a port for the processes of each role on one machine, before the number of the replica."""


def split_address(address: str) -> tuple[str, int] | None:
    """Return host and port of ``host:port``, an IPv6 address in brackets; None for anything else."""
    host, colon, port = address.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if is_bracketed:
        host = host[1:-1]
    if not (colon and host and port.isascii() and port.isdecimal() and int(port) <= MAX_PORT):
        return None
    return (host, int(port)) if is_bracketed or ":" not in host else None


def join_address(host: str, port: int) -> str:
    """Return ``host:port``, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_of(address: str, name: str) -> str:
    """Return the address of one process among those of a machine.

    Args:
        address: ``host:port``, of the controller; a free port, 0, is free for all.
        name: of the process, such as ``rollout-2``.

    Raises:
        ConfigError: there is no such port.
    """
    found = split_address(address)
    role, _, number = name.partition("-")
    if found is None or not found[1] or role not in ROLE_PORTS:
        return address
    port = found[1] + ROLE_PORTS[role] + (int(number) if number.isdecimal() else 0)
    if port > MAX_PORT:
        raise ConfigError(f"observe.http = {address!r} leaves no port for {name}, which takes {port}; give a lower one")
    return join_address(found[0], port)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
