"""The transports of one puller: each is set up when it is first needed, and its connections last over many pulls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from starling.weightsync.plan.offer import RankOffer, Transport
from starling.weightsync.transports.base import SourceConnection, TransportClient
from starling.weightsync.transports.local import LocalClient
from starling.weightsync.transports.nixl.client import NixlClient
from starling.weightsync.transports.tcp import tcp_client
from starling.weightsync.transports.ucx.server import UcxClient
from starling.weightsync.transports.ucx.worker import is_loopback


class SourceConnections:
    """Finds the transport for an offer, and keeps connections while they are of use."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._wires: dict[str, TransportClient] = {}
        self._connected: dict[str, SourceConnection] = {}
        self._next_number = 1

    def numbers(self, num: int) -> int:
        """Take `num` numbers that were never used here, and return the first: late messages must not be mistaken."""
        first = self._next_number
        self._next_number += num
        return first

    def peers(self, groups: Mapping[int, Sequence[RankOffer]]) -> dict[int, list[SourceConnection]]:
        """Return the peers that stand for offers, connected already where an earlier pull left them so.

        Raises:
            WeightsError: a transport that cannot be used here.
        """
        fresh: dict[str, SourceConnection] = {}
        for offer in (offer for group in groups.values() for offer in group):
            key = _key(offer)
            if key not in fresh:
                old = self._connected.pop(key, None)
                state = old.state if old is not None and old.state == "connected" else "new"
                fresh[key] = SourceConnection(key, offer, self._wire(offer), state)
        for key, peer in self._connected.items():
            peer.wire.drop(key)
        self._connected = fresh
        return {rank: [fresh[_key(offer)] for offer in group] for rank, group in groups.items()}

    def drop_all(self) -> None:
        """Hang up on every source."""
        for key, peer in self._connected.items():
            peer.wire.drop(key)
        self._connected = {}

    def close(self) -> None:
        """Hang up, and let go of every transport."""
        self.drop_all()
        for wire in self._wires.values():
            wire.close()
        self._wires = {}

    def _wire(self, offer: RankOffer) -> TransportClient:
        name: str = offer.transport
        loopback = is_loopback(offer.address.rpartition(":")[0])
        if name in ("ucx", "nixl") and loopback:
            name = f"{name} on this host"
        if name not in self._wires:
            self._wires[name] = self._make(offer.transport, loopback=loopback)
        return self._wires[name]

    def _make(self, transport: Transport, *, loopback: bool) -> TransportClient:
        match transport:
            case "local":
                return LocalClient(self._pool)
            case "tcp":
                return tcp_client()
            case "ucx":
                return UcxClient(loopback=loopback)
            case "nccl" | "gloo":
                from starling.weightsync.transports.collective import collective_client  # imports torch: see `serve`

                return collective_client(transport)
            case "nixl":
                return NixlClient(loopback=loopback)


def _key(offer: RankOffer) -> str:
    return f"{offer.transport}:{offer.address}"
