"""Addresses, the transport for an address, and the limits of connections that all transports share."""

from __future__ import annotations

import ipaddress
import resource
from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from starling.common.errors import WeightsError
from starling.weightsync.offers.offer import Offer, Transport, TransportChoice

LONGEST_WAIT_S: Final = 0.05
"""Longest uninterrupted wait, so that a cancellation is noticed."""
IDLE_TIMEOUT_S: Final = 10.0
"""How long a connection may last without a valid ticket, and how long a peer may accept none of what is sent."""
WAITING_INTERVAL_S: Final = 0.5
"""How often a source tells a reader that what it has requested has not arrived yet; see `SourceAnswer.waiting`."""
MAX_CONNECTIONS: Final = 1024
"""Maximum number of connections of one server."""
MAX_SHARE: Final = 128
"""Connections of one replica, and connections without a ticket, that a full server keeps when others come: an eighth,
also where it takes fewer. A replica of more ranks can still have all of a server that is not full."""
MAX_WAITING: Final = 16
"""Maximum number of requests of one connection that wait or are being answered; a pull has `BUCKETS_PER_SOURCE`."""
MAX_QUEUED_BYTES: Final = 2 << 20
"""Most bytes of answers that wait for one connection; an answer is much shorter."""
ACCEPT_BACKOFF_S: Final = 1.0
"""Pause after a connection could not be accepted, for example because the process has no descriptors left."""

_PORT_DIGITS: Final = 5
_SHOWN_CHARACTERS: Final = 255
"""Longest name of a host, and how much of a malformed address an error shows."""


def most_connections(most: int = MAX_CONNECTIONS) -> int:
    """Return how many connections a server takes: at most `most`, and no more than leave the process a third of its
    descriptors. Each takes two, and a policy that has none left cannot save its state."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return most if files == resource.RLIM_INFINITY else min(most, files // 3)


def surplus(readers: Sequence[str]) -> int | None:
    """Return which connection a full server closes for a new one; None for the new one itself.

    One replica could otherwise keep all others away: its connections stay open between its pulls.

    Args:
        readers: the name of the replica of each connection, from the oldest; empty for one without a ticket.
    """
    name, num = max(Counter(readers).items(), key=lambda item: item[1])
    return readers.index(name) if num > min(MAX_SHARE, len(readers) // 8) else None


def split_address(address: str) -> tuple[str, int]:
    """Parse ``host:port``.

    Raises:
        WeightsError: it is not of that form.
    """
    host, _, port = address.rpartition(":")
    is_port = len(port) <= _PORT_DIGITS and port.isdecimal() and 0 < int(port) < 1 << 16
    if not host or not is_port or not _is_name(host):
        raise WeightsError(f"{address[:_SHOWN_CHARACTERS]!r} is not an address of the form host:port.")
    return host, int(port)


def _is_name(host: str) -> bool:
    """Return whether a host can be looked up: a peer may send any text."""
    try:
        return len(host) <= _SHOWN_CHARACTERS and bool(host.encode("idna"))
    except UnicodeError:
        return False


def is_loopback(host: str) -> bool:
    """Return whether `host` can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class ServingOptions(NamedTuple):
    """How a rank serves weights to other replicas."""

    transport: Transport
    host: str
    """The address that they connect to."""
    encrypt: bool = False

    @property
    def can_relay(self) -> bool:
        """Whether readers wait for what has not arrived yet. Those of shared memory ask nobody."""
        return self.transport != "local"


def choose_transport(
    choice: TransportChoice, host: str, *, encrypt: bool | None, rdma: bool = False
) -> tuple[Transport, bool]:
    """Return the transport of weights that are offered at an address, and whether it encrypts them.

    UCX, NIXL, NCCL and gloo cannot encrypt, and anyone who can connect to a port of theirs can take over the process.
    So the default between hosts is encrypted `tcp`, and the others are for private networks.

    Args:
        choice: the transport; `auto`: `ucx` where the address is of this machine only, or where `rdma` and `encrypt`
            is False, which says that the network is private; else `tcp`.
        host: the address.
        encrypt: whether weights that leave the machine must be encrypted; None: if the transport is `tcp`; False: none
            are.
        rdma: whether this host has an active RDMA port and a UCX that can use it.

    Raises:
        WeightsError: this transport cannot encrypt.
    """
    loopback = is_loopback(host)
    automatic: Transport = "ucx" if loopback or (rdma and encrypt is False) else "tcp"
    transport = automatic if choice == "auto" else choice
    if encrypt and not loopback and transport not in ("tcp", "local"):
        raise WeightsError(
            f"Transport {transport!r} cannot encrypt weights, and other hosts reach {host}: choose 'tcp', or do not "
            "require encryption if no other host can reach that network."
        )
    return transport, transport == "tcp" and not loopback and encrypt is not False


def check_offered_transports(offer: Offer, choice: TransportChoice | None, host: str, *, encrypt: bool | None) -> None:
    """Check that a reader may open connections to `offer`, whose transport decides which ports the reader opens.

    Encrypted `tcp` and `local` are allowed always: neither opens a port, or shows anything to a network. Plain `tcp` is
    allowed in place of `ucx`, too, which falls back to it; and `ucx` in its place where both sides chose automatically
    on a private network, since the source may have RDMA where the reader has none.

    Args:
        offer: what the reader was told to read.
        choice: the transport of the sources, by the reader's settings; None if these do not say it.
        host: the reader's own address. What is allowed only within one machine is so if both addresses are.
        encrypt: as in `choose_transport`.

    Raises:
        WeightsError: an offer that the settings do not allow.
    """
    for rank in offer.ranks:
        is_safe = rank.transport == "local" or (rank.transport == "tcp" and rank.encrypted)
        if is_safe or (choice is None and not encrypt):
            continue
        where = rank.address.rpartition(":")[0] if is_loopback(host) else host
        wanted, encrypted = choose_transport(choice or rank.transport, where, encrypt=encrypt)
        is_either = wanted == "ucx" or (choice == "auto" and encrypt is False)
        if encrypted or rank.transport not in (("ucx", "tcp") if is_either else (wanted,)):
            raise WeightsError(
                f"An offer of version {offer.version} is for transport {rank.transport!r}, not encrypted, which this "
                f"reader does not allow at {where}: choose the same transport and encryption for it and its source."
            )
