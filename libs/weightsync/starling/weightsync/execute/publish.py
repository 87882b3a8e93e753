"""The publisher: copies a rank's shards into a snapshot, and lets others read it while training goes on."""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from types import TracebackType
from typing import Final

import torch

from starling.common.errors import WeightsError
from starling.weightsync.execute.arena import Arena
from starling.weightsync.execute.link import is_loopback
from starling.weightsync.execute.serve import Server
from starling.weightsync.execute.tensors import bytes_of, live_views, packed_views
from starling.weightsync.layout import Layout, aligned, check_layout, pieces_of
from starling.weightsync.offer import Offer, RankOffer, Transport, digest_of, make_offer

CLOSE_S: Final = 5.0


class Publisher:
    """Offers the shards of one rank, version by version, from two snapshots in turn.

    The local copy into a snapshot is all that training waits for, unless both snapshots are being read: then `publish`
    waits for a reader to finish, at most `read_timeout_s`, and then revokes the older snapshot. Its readers get a
    `WeightsError` and keep the version that they have.

    Args:
        layout: what the replica holds.
        transport: ``ucx`` serves readers on any host from a thread of its own; ``local`` only on this host, by memory.
        rank: which rank of the layout this process is.
        host: the address that readers connect to (ucx); a loopback address keeps UCX off the network devices.
        read_timeout_s: how long `publish` waits for readers before it revokes a snapshot.

    Raises:
        WeightsError: a layout that is not consistent, not enough memory for two snapshots, or no UCX.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        transport: Transport,
        rank: int = 0,
        host: str = "127.0.0.1",
        read_timeout_s: float = 30.0,
    ) -> None:
        check_layout(layout)
        self._layout, self._rank, self._transport = layout, rank, transport
        self._read_timeout_s = read_timeout_s
        self._pieces = pieces_of(layout, rank)
        self._version = -1
        self._arena: Arena | None = Arena(sum(aligned(piece.size_bytes) for piece in self._pieces))
        self._views = tuple(packed_views(layout, rank, slot) for slot in self._arena.slots)
        self._server: Server | None = None
        self._address = self._arena.address
        if transport == "ucx":
            try:
                self._server = Server(self._arena.address, loopback=is_loopback(host))
            except WeightsError:
                self.close()
                raise
            self._address = f"{host}:{self._server.port}"
        atexit.register(self.close)

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Offer:
        """Copy this rank's shards into a snapshot and offer it as `version`.

        Args:
            version: greater than any published before.
            tensors: the storages of the layout by name, for plain modules the mapping given to `layout_of`.

        Raises:
            WeightsError: the version does not grow, the tensors do not fit the layout, or serving has failed.
        """
        if self._arena is None:
            raise WeightsError("The publisher is closed.")
        if self._server is not None and self._server.failure:
            raise WeightsError(f"Weights are served no longer: {self._server.failure}.")
        if version <= self._version:
            raise WeightsError(f"Version {version} cannot follow version {self._version}: versions grow from 0.")
        sources = live_views(self._layout, self._rank, tensors)
        slot = self._arena.claim(self._read_timeout_s)
        digests = []
        with torch.no_grad():
            for copy, source in zip(self._views[slot], sources, strict=True):
                copy.copy_(source)
                digests.append(digest_of(bytes_of(copy).data))
        snapshot, token = self._arena.commit(slot)
        self._version = version
        offer = RankOffer(
            rank=self._rank,
            transport=self._transport,
            address=self._address,
            token=token,
            snapshot=snapshot,
            pieces=self._pieces,
            digests=tuple(digests),
        )
        return make_offer(version, [offer])

    def close(self, deadline_s: float = CLOSE_S) -> None:
        """End serving and free the snapshots. May be called twice.

        Raises:
            WeightsError: the serving thread did not end within `deadline_s`.
        """
        atexit.unregister(self.close)
        arena, self._arena = self._arena, None
        server, self._server = self._server, None
        self._views = ()
        try:
            if server is not None:
                server.close(deadline_s)
        finally:
            if arena is not None:
                arena.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
