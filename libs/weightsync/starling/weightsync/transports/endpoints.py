"""Addresses, the transport for an address, and the limits of connections that all transports share."""

from __future__ import annotations

import ipaddress
from typing import Final

from starling.common.errors import WeightsError
from starling.weightsync.plan.offer import Transport, TransportChoice

LONGEST_WAIT_S: Final = 0.05
"""Longest uninterrupted wait, so that a cancellation is noticed."""
IDLE_TIMEOUT_S: Final = 10.0
"""How long a connection may last without a valid token, and how long a peer may accept none of what is sent."""
MAX_CONNECTIONS: Final = 1024
"""Maximum number of readers of one server."""
ACCEPT_BACKOFF_S: Final = 1.0
"""Pause after a connection could not be accepted, for example because the process has no descriptors left."""


def split_address(address: str) -> tuple[str, int]:
    """Parse ``host:port``.

    Raises:
        WeightsError: it is not of that form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise WeightsError(f"{address!r} is not an address of the form host:port.")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Return whether `host` can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def choose_transport(choice: TransportChoice, host: str, *, encrypt: bool | None) -> tuple[Transport, bool]:
    """Return the transport of weights that are offered at an address, and whether it encrypts them.

    UCX, NIXL, NCCL and gloo cannot encrypt, and anyone who can connect to a port of theirs can take over the process.
    So the default between hosts is encrypted `tcp`, and the others are for private networks.

    Args:
        choice: the transport; `auto`: `ucx` where the address is of this machine only, else `tcp`.
        host: the address.
        encrypt: whether weights that leave the machine must be encrypted; None: if the transport is `tcp`.

    Raises:
        WeightsError: this transport cannot encrypt.
    """
    loopback = is_loopback(host)
    transport: Transport = ("ucx" if loopback else "tcp") if choice == "auto" else choice
    if encrypt and not loopback and transport not in ("tcp", "local"):
        raise WeightsError(
            f"Transport {transport!r} cannot encrypt weights, and other hosts reach {host}: choose 'tcp', or set "
            "network.encrypt_weights = false where nobody else reaches that network."
        )
    return transport, transport == "tcp" and not loopback and encrypt is not False
