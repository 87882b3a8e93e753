"""Connections of one puller to its sources: created when first needed, and kept open over many pulls."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Literal

from starling.common.errors import WeightsError
from starling.weightsync.offers.offer import RankOffer
from starling.weightsync.offers.tickets import TicketProof
from starling.weightsync.transports.base import ReadTarget, TransportClient
from starling.weightsync.transports.devices import net_devices
from starling.weightsync.transports.endpoints import most_connections
from starling.weightsync.transports.messages import Request
from starling.weightsync.transports.registry import make_client

WAITING_STALLS: Final = 3
"""A relay whose source has stalled turns to another one after `stall_s`. Its own readers wait for that, so that only
one of a chain turns to the policy; but not for ever."""

ConnectionState = Literal["new", "connected", "opening", "open", "dead"]


@dataclass
class SourceConnection:
    """A source that can be asked: its offer, its transport, and its outstanding requests."""

    key: str
    offer: RankOffer
    client: TransportClient
    state: ConnectionState = "new"
    reason: str = ""
    """Why it is dead."""
    bases: tuple[int, ...] = ()
    """Versions against which it may have deltas."""
    in_flight: int = 0
    """Buckets requested and not yet answered."""
    num_outstanding: int = 0
    """Requests not yet answered."""
    last_answer_at: float = 0.0
    """Monotonic time of its last answer, or of the first request after it had answered all."""
    last_sign_at: float = 0.0
    """The same, or when it said last that it waits itself."""

    def ask(self, request: Request, target: ReadTarget, proof: TicketProof | None = None) -> None:
        """Send a request; `proof` is the one in an `OpenSnapshot`."""
        if not self.num_outstanding:
            self.last_answer_at = self.last_sign_at = time.monotonic()
        self.num_outstanding += 1
        self.client.ask(self.key, request, target, proof)

    def answered(self) -> None:
        """Record an answer."""
        self.num_outstanding -= 1
        self.last_answer_at = self.last_sign_at = time.monotonic()

    def stalled_s(self, stall_s: float) -> float:
        """Return for how many seconds it has owed an answer if that is too long, else 0.

        Too long is `stall_s` without any sign, and `WAITING_STALLS` times as long while it says that it waits itself.
        """
        now = time.monotonic()
        is_silent = now - self.last_sign_at > stall_s or now - self.last_answer_at > WAITING_STALLS * stall_s
        return now - self.last_answer_at if self.num_outstanding and is_silent else 0.0


class SourceConnections:
    """The transport clients of a puller, and the connections that a later pull can reuse."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._clients: dict[tuple[str, str | None], TransportClient] = {}
        self._connected: dict[str, SourceConnection] = {}
        self._next_number = 1

    def numbers(self, num: int) -> int:
        """Reserve `num` request numbers and return the first. None is reused, so that late messages are recognised."""
        first = self._next_number
        self._next_number += num
        return first

    def connections(self, groups: Mapping[int, Sequence[RankOffer]]) -> dict[int, list[SourceConnection]]:
        """Return a connection for each offer, the one of an earlier pull where it is still connected.

        Connections that are not among them are closed.

        Raises:
            WeightsError: a transport is not available here, or there are more sources than this process can connect to.
        """
        if len(groups) > most_connections():
            raise WeightsError(
                f"The plan reads from {len(groups)} sources, and this process may connect to {most_connections()}: let "
                "it open more files (ulimit -n), or split the source over fewer ranks."
            )
        fresh: dict[str, SourceConnection] = {}
        for offer in (offer for group in groups.values() for offer in group):
            key = _key(offer)
            if key not in fresh:
                old = self._connected.pop(key, None)
                state = old.state if old is not None and old.state == "connected" else "new"
                fresh[key] = SourceConnection(key, offer, self._client(offer), state)
        self.drop_all()
        self._connected = fresh
        return {rank: [fresh[_key(offer)] for offer in group] for rank, group in groups.items()}

    def drop_all(self) -> None:
        """Close every connection."""
        for key, connection in self._connected.items():  # first of all, since each is then waited for
            connection.client.hang_up(key)
        for key, connection in self._connected.items():
            connection.client.drop(key)
        self._connected = {}

    def close(self) -> None:
        """Close every connection and every transport client."""
        self.drop_all()
        for client in self._clients.values():
            client.close()
        self._clients = {}

    def _client(self, offer: RankOffer) -> TransportClient:
        host = offer.address.rpartition(":")[0]
        key = (offer.transport, net_devices(host) if offer.transport in ("ucx", "nixl") else None)
        if key not in self._clients:
            self._clients[key] = make_client(offer.transport, self._pool, host=host)
        return self._clients[key]


def _key(offer: RankOffer) -> str:
    return f"{offer.transport}:{offer.address}"
