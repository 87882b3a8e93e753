"""Which server makes a source readable over a transport."""

from __future__ import annotations

import logging
from typing import Protocol

from starling.common.errors import WeightsError
from starling.weightsync.plan.offer import Transport
from starling.weightsync.transports.nixl.server import NixlServer
from starling.weightsync.transports.source import SnapshotSource
from starling.weightsync.transports.tcp import tcp_server
from starling.weightsync.transports.ucx.server import UcxServer
from starling.weightsync.transports.ucx.worker import load_ucxx

log = logging.getLogger(__name__)


class TransportServer(Protocol):
    """Serves a source from threads of its own until closed."""

    address: str
    """Where readers connect."""
    failure: str
    """Why serving has ended, if it did by itself."""

    def wake(self) -> None:
        """Look whether what a reader waits for has arrived."""

    def close(self, deadline_s: float) -> None:
        """End serving. Raises WeightsError when that takes longer than `deadline_s`."""


def serve(source: SnapshotSource, transport: Transport, host: str) -> tuple[TransportServer | None, Transport, str]:
    """Make a source readable.

    Where UCX is asked for and is not to be had, plain sockets serve instead, and a warning says so. NIXL is asked for
    because of what it makes of a network: without it there is no server.

    Returns:
        The server, if the transport has one; the transport that is used, and the address to be offered.

    Raises:
        WeightsError: nobody can be served at `host`, or not over this transport.
    """
    if transport == "local":
        return None, transport, source.address
    if transport == "ucx":
        try:
            load_ucxx()
        except WeightsError as error:
            log.warning("weights travel over plain sockets, several times slower: %s", error)
            transport = "tcp"
    server = _server(source, transport, host)
    return server, transport, server.address


def _server(source: SnapshotSource, transport: Transport, host: str) -> TransportServer:
    if transport == "ucx":
        return UcxServer(source, host=host)
    if transport == "nccl" or transport == "gloo":
        from starling.weightsync.transports.collective import (
            collective_server,  # imports torch, which others do without
        )

        return collective_server(source, transport, host=host)
    if transport == "nixl":
        return NixlServer(source, host=host)
    return tcp_server(source, host=host)
