"""Transports by name: the server and the client of each."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from starling.common.errors import WeightsError
from starling.weightsync.offers.offer import RankOffer, Transport, TransportChoice
from starling.weightsync.transports.base import TransportClient, TransportServer
from starling.weightsync.transports.endpoints import choose_transport, is_loopback
from starling.weightsync.transports.local import LocalClient, LocalServer
from starling.weightsync.transports.nixl.client import NixlClient
from starling.weightsync.transports.nixl.server import NixlServer
from starling.weightsync.transports.rdma import SYSFS, active_ports, unused_rdma
from starling.weightsync.transports.source import SnapshotSource
from starling.weightsync.transports.tcp import tcp_client, tcp_server
from starling.weightsync.transports.ucx.client import UcxClient
from starling.weightsync.transports.ucx.server import UcxServer
from starling.weightsync.transports.ucx.worker import has_rdma, load_ucxx

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Serving:
    """A source that readers can reach."""

    server: TransportServer
    transport: Transport
    """The transport in use, which may not be the requested one."""
    encrypted: bool

    def offer(self, *, rank: int, snapshot: int, secret: str, holds: str, root: str) -> RankOffer:
        """Return the offer of a snapshot of the source."""
        return RankOffer(
            rank=rank,
            transport=self.transport,
            address=self.server.address,
            encrypted=self.encrypted,
            secret=secret,
            snapshot=snapshot,
            holds=holds,
            root=root,
        )


class ChosenTransport(NamedTuple):
    """The transport that suits this host."""

    transport: Transport
    encrypted: bool
    unused_rdma: str
    """Why weights travel over TCP beside an active RDMA port, as a sentence with the remedy; empty if they do not."""


def choose_for_host(choice: TransportChoice, host: str, *, encrypt: bool | None, root: Path = SYSFS) -> ChosenTransport:
    """Return the transport of weights that this host offers at its address `host`; see `choose_transport`.

    Args:
        choice: the transport, or `auto`.
        host: the address.
        encrypt: as in `choose_transport`.
        root: where the kernel lists RDMA devices.

    Raises:
        WeightsError: this transport cannot encrypt.
    """
    if is_loopback(host) or not active_ports(root):
        return ChosenTransport(*choose_transport(choice, host, encrypt=encrypt), "")
    rdma = has_rdma()
    transport, encrypted = choose_transport(choice, host, encrypt=encrypt, rdma=rdma)
    reason = unused_rdma(transport, choice, encrypt=encrypt, has_rdma=rdma, root=root)
    return ChosenTransport(transport, encrypted, reason)


def serve(source: SnapshotSource, transport: Transport, host: str, *, encrypted: bool = False) -> Serving:
    """Make a source readable.

    Where UCX is requested but not installed, plain sockets serve instead, with a warning. There is no such fallback for
    NIXL: it is chosen for its RDMA. `encrypted` is for plain sockets only.

    Raises:
        WeightsError: `host` cannot be listened on, or this transport is not available, or cannot encrypt.
    """
    if encrypted and transport != "tcp":
        raise WeightsError(f"Transport {transport!r} cannot encrypt weights: choose 'tcp'.")
    if transport == "ucx":
        try:
            load_ucxx()
        except WeightsError as error:
            log.warning("weights travel over plain sockets, several times slower: %s", error)
            transport = "tcp"
    return Serving(_make_server(source, transport, host, encrypted=encrypted), transport, encrypted)


def make_client(transport: Transport, pool: ThreadPoolExecutor, *, host: str) -> TransportClient:
    """Return a client of `transport`.

    Args:
        transport: which one.
        pool: threads for a transport that copies by itself.
        host: address of the sources; UCX and NIXL use the network devices that reach it only.

    Raises:
        WeightsError: this transport is not available.
    """
    match transport:
        case "local":
            return LocalClient(pool)
        case "tcp":
            return tcp_client()
        case "ucx":
            return UcxClient(host=host)
        case "nccl" | "gloo":
            from starling.weightsync.transports.collective import collective_client  # imports torch

            return collective_client(transport)
        case "nixl":
            return NixlClient(host=host)


def _make_server(source: SnapshotSource, transport: Transport, host: str, *, encrypted: bool) -> TransportServer:
    if transport == "local":
        return LocalServer(source)
    if transport == "ucx":
        return UcxServer(source, host=host)
    if transport == "nccl" or transport == "gloo":
        from starling.weightsync.transports.collective import collective_server  # imports torch

        return collective_server(source, transport, host=host)
    if transport == "nixl":
        return NixlServer(source, host=host)
    return tcp_server(source, host=host, encrypted=encrypted)
