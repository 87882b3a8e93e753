"""The publisher of one rank: copies its shards into a snapshot, which readers pull while training continues."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, Final

import torch

from starling.common.errors import WeightsError
from starling.weightsync.delta.format import DeltaTotal
from starling.weightsync.memory.arena import Arena, WhenBusy
from starling.weightsync.memory.arrays import Array, packed_arrays, part_of
from starling.weightsync.memory.digests import DigestMode, digest_of_array
from starling.weightsync.offers.offer import (
    Offer,
    RankOffer,
    Transport,
    digest_of,
    holds_of,
    layout_root,
    make_offer,
    rank_root,
    root_of,
)
from starling.weightsync.plan.boxes import contains
from starling.weightsync.plan.layout import Box, Layout, check_layout, encode, pieces_of
from starling.weightsync.plan.planner import Plan
from starling.weightsync.publisher.delta_history import DeltaHistory
from starling.weightsync.quantise.recipe import QuantRecipe
from starling.weightsync.tensors.quantiser import MaximaExchange, Quantiser
from starling.weightsync.tensors.views import live_views, packed_views
from starling.weightsync.transports.base import TransportServer
from starling.weightsync.transports.endpoints import is_loopback
from starling.weightsync.transports.registry import serve
from starling.weightsync.transports.source import SnapshotSource

CLOSE_TIMEOUT_S: Final = 5.0
DELTA_VERSIONS: Final = 2
DIGEST_TIMEOUT_S: Final = 600.0
"""Longest wait for the digests of a snapshot."""


class PublishedSnapshot:
    """One version in a snapshot, whose digests are being computed in another thread."""

    def __init__(
        self,
        version: int,
        stall_s: float,
        rank: Future[RankOffer],
        layout_roots: dict[str, Future[str]],
        changes: Future[DeltaTotal | None] | None = None,
    ) -> None:
        self.version = version
        self.stall_s = stall_s
        """Seconds that the snapshot took: the only part of publishing that blocks training."""
        self._rank, self._layout_roots, self._changes = rank, layout_roots, changes

    def layout_roots(self, timeout_s: float = DIGEST_TIMEOUT_S) -> dict[str, str]:
        """Return the layout roots by the keys under which their plans were given; those that failed are left out.

        Raises:
            WeightsError: not within `timeout_s`, or a later version or `close` has ended it.
        """
        deadline = time.monotonic() + timeout_s
        roots: dict[str, str] = {}
        for key, future in list(self._layout_roots.items()):  # more may be asked for meanwhile
            try:
                if future.exception(max(0.0, deadline - time.monotonic())) is None:
                    roots[key] = future.result()
            except TimeoutError as error:
                raise WeightsError(f"Version {self.version} was not digested within {timeout_s:g} s.") from error
            except CancelledError as error:
                raise WeightsError(f"Version {self.version} is gone: a later one was published, or none.") from error
        return roots

    def offer(self, timeout_s: float = DIGEST_TIMEOUT_S) -> Offer:
        """Return the offer, once the root of the version is known.

        Raises:
            WeightsError: not within `timeout_s`, or the publisher was closed.
        """
        try:
            return make_offer(self.version, [self._rank.result(timeout_s)])
        except TimeoutError as error:
            raise WeightsError(f"Version {self.version} was not digested within {timeout_s:g} s.") from error
        except CancelledError as error:
            raise WeightsError(f"Version {self.version} is gone: its publisher was closed.") from error

    def encoded_offer(self, timeout_s: float = DIGEST_TIMEOUT_S) -> bytes:
        """Return the offer as it travels. Raises WeightsError as `offer` does."""
        return encode(self.offer(timeout_s))

    def changes(self, timeout_s: float = DIGEST_TIMEOUT_S) -> DeltaTotal | None:
        """Return how much changed since the previous version; None where it was not compared, or the next snapshot
        interrupted the comparison.

        Raises:
            WeightsError: not known within `timeout_s`.
        """
        try:
            return None if self._changes is None else self._changes.result(timeout_s)
        except TimeoutError as error:
            raise WeightsError(f"Version {self.version} was not compared within {timeout_s:g} s.") from error
        except CancelledError:
            return None


class Publisher:
    """Offers the shards of one rank, version by version, from two alternating snapshots.

    Training waits for the local copy into a snapshot only, unless both snapshots are being read. Then `when_busy`
    decides: ``revoke`` waits for a reader to finish, at most `read_timeout_s`, and then revokes the older snapshot,
    whose readers get a `WeightsError` and keep the version that they have; ``wait`` waits as long and then raises
    `SnapshotsBusyError`; ``skip`` raises it at once. When it is raised, nothing has changed.

    Args:
        layout: what the replica holds.
        transport: ``ucx``, ``nixl``, ``nccl``, ``gloo`` and ``tcp`` serve readers on any host from threads of their
            own; ``local`` only on this host, by shared memory.
        rank: which rank of the layout this process is.
        host: the address that readers connect to; UCX and NIXL use its network devices only.
        read_timeout_s: how long a snapshot waits for readers.
        when_busy: see above.
        digests: ``full`` covers every byte of the version's root, ``sampled`` a sixteenth, another one each version;
            ``off`` makes a root that covers only the version's number.
        delta_versions: how many versions back deltas are kept, for destinations that still hold one of them; 0 compares
            nothing. By default 2, but 0 where readers are on this host: there comparing takes longer than sending
            everything. Deltas take at most as much memory as one snapshot.
        quantise: which tensors are published quantised, and how; by default none.
        exchange: how the ranks exchange the maxima of scale groups that are cut between them; every rank then takes
            the snapshots of the same versions in the same order, and `layout` is that of all ranks.
        encrypt: encrypt what readers get; the transport must be ``tcp``.

    Raises:
        WeightsError: an inconsistent layout, not enough memory for two snapshots, a transport that is not available or
            cannot encrypt, or a recipe that does not fit the layout.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        transport: Transport,
        rank: int = 0,
        host: str = "127.0.0.1",
        read_timeout_s: float = 30.0,
        when_busy: WhenBusy = "revoke",
        digests: DigestMode = "full",
        delta_versions: int | None = None,
        quantise: QuantRecipe | None = None,
        exchange: MaximaExchange | None = None,
        encrypt: bool = False,
    ) -> None:
        check_layout(layout)
        self._layout, self._rank = layout, rank
        self._read_timeout_s, self._when_busy, self._digests = read_timeout_s, when_busy, digests
        self._quantiser = Quantiser(layout, rank, quantise, exchange) if quantise else None
        self.layout = layout = self._quantiser.layout if self._quantiser else layout
        """Layout of what is published: the source of plans."""
        self._pieces = pieces_of(layout, rank)
        self._holds = holds_of(self._pieces)
        self._version = -1
        self._arena: Arena | None = Arena(self._pieces)
        self._views = tuple(packed_views(layout, rank, slot) for slot in self._arena.slots)
        self._arrays = tuple(packed_arrays(self._pieces, slot) for slot in self._arena.slots)
        self._source = SnapshotSource(self._arena, self._pieces)
        self._digesting: dict[int, list[Future[Any]]] = {}
        """By slot, what the digesting thread computes from it."""
        self._layout_roots: dict[str, Future[str]] = {}
        """The layout roots of the newest version."""
        self._snapshot = 0
        """Number of the snapshot of the newest version."""
        self._history: DeltaHistory | None = None
        self._comparing: Future[DeltaTotal | None] | None = None
        self._stop_comparing = threading.Event()
        self._last_slot = -1
        if delta_versions is None:
            delta_versions = 0 if transport == "local" or is_loopback(host) else DELTA_VERSIONS
        if delta_versions > 0:
            self._history = DeltaHistory(
                self._pieces, delta_versions, self._arena.extent_bytes, self._arena.is_readable
            )
            self._source.deltas = self._history
        self._encrypted = encrypt
        self._server: TransportServer | None = None
        try:
            self._server, self._transport, self._address = serve(self._source, transport, host, encrypted=encrypt)
        except WeightsError:
            self._arena.close()
            raise
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weightsync-digest")
        self._closing = threading.Event()
        # The servers of other transports do this themselves. It does not run in the pool: the first digests would wait
        # for it, a second for each few GiB.
        self._pages = threading.Thread(
            target=self._arena.collapse, args=(self._closing.is_set,), name="weightsync-pages", daemon=True
        )
        if transport == "local":
            self._pages.start()
        atexit.register(self.close)

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Offer:
        """Copy this rank's shards into a snapshot, digest it, and offer it as `version`.

        Raises:
            WeightsError: as `snapshot`.
        """
        return self.snapshot(version, tensors).offer()

    def snapshot(
        self, version: int, tensors: Mapping[str, torch.Tensor], root_plans: Mapping[str, Plan] | None = None
    ) -> PublishedSnapshot:
        """Copy this rank's shards into a snapshot, or quantise them into it; digests follow in another thread.

        Args:
            version: greater than any published before.
            tensors: the storages of the layout by name, for plain modules the mapping given to `layout_of`.
            root_plans: plans to destinations whose layout roots are computed, by any keys. The digests of their boxes
                are kept for the readers, which need the same ones.

        Raises:
            SnapshotsBusyError: both snapshots are being read, and `when_busy` forbids to revoke one.
            WeightsError: the version does not grow, the tensors do not fit the layout or cannot be quantised, another
                rank did not exchange its maxima, or serving has failed.
        """
        begin = time.perf_counter()
        if self._arena is None:
            raise WeightsError("The publisher is closed.")
        if self._server is not None and self._server.failure:
            raise WeightsError(f"Serving weights has failed: {self._server.failure}.")
        if version <= self._version:
            raise WeightsError(f"Version {version} cannot follow version {self._version}: versions grow from 0.")
        sources = live_views(self._layout, self._rank, tensors)
        # Before a slot is claimed: where claiming fails on one rank, the others do not wait for its maxima.
        fill = self._quantiser.measured(sources) if self._quantiser else partial(_copy, sources)
        slot = self._arena.claim(self._read_timeout_s, self._when_busy)
        self._await_digests(slot)
        self._end_comparing()
        with torch.no_grad():
            fill(self._views[slot])
        snapshot, secret = self._arena.commit(slot)
        before, base = self._last_slot, self._version if self._last_slot not in (-1, slot) else -1
        self._version, self._last_slot = version, slot
        if self._history is not None:
            self._history.begin(snapshot, version, base)
        future = self._pool.submit(self._digest, version, snapshot, secret, self._arrays[slot])
        self._digesting[slot] = [future]
        self._snapshot, self._layout_roots = snapshot, {}
        self.add_layout_roots(root_plans or {})  # before the comparison, for which the offer does not wait
        if self._history is not None and base >= 0:
            self._stop_comparing.clear()
            self._comparing = self._pool.submit(self._compare, before, slot)
        return PublishedSnapshot(version, time.perf_counter() - begin, future, self._layout_roots, self._comparing)

    def add_layout_roots(self, root_plans: Mapping[str, Plan]) -> None:
        """Compute these layout roots of the newest version, too; see `snapshot`. Known keys are not computed again.

        Raises:
            WeightsError: nothing was published yet, or the publisher is closed.
        """
        if self._last_slot < 0 or self._arena is None:
            raise WeightsError("There is no version whose layout roots could be computed.")
        for key, plan in root_plans.items():
            if key not in self._layout_roots:
                future = self._pool.submit(self._layout_root, plan, self._version, self._snapshot, self._last_slot)
                self._layout_roots[key] = future
                self._digesting[self._last_slot].append(future)

    def close(self, deadline_s: float = CLOSE_TIMEOUT_S) -> None:
        """End serving and free the snapshots. May be called twice.

        Raises:
            WeightsError: a serving thread did not end within `deadline_s`.
        """
        atexit.unregister(self.close)
        arena, self._arena = self._arena, None
        if arena is None:
            return
        server, self._server = self._server, None
        self._closing.set()
        self._stop_comparing.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._pages.ident is not None:
            self._pages.join(deadline_s)
        self._views = self._arrays = ()
        self._digesting.clear()
        try:
            if server is not None:
                server.close(deadline_s)
        finally:
            arena.close()

    def _await_digests(self, slot: int) -> None:
        """Wait until the digesting thread no longer reads the slot."""
        for future in self._digesting.pop(slot, ()):
            if not future.cancel():
                future.exception(DIGEST_TIMEOUT_S)

    def _end_comparing(self) -> None:
        """Interrupt the comparison, which reads the slot to be overwritten: publishing does not wait for deltas."""
        future, self._comparing = self._comparing, None
        if future is None:
            return
        self._stop_comparing.set()
        if future.cancel():
            assert self._history is not None
            self._history.end(None)
        elif not future.cancelled():
            future.exception(DIGEST_TIMEOUT_S)  # it ends after some milliseconds

    def _compare(self, before: int, slot: int) -> DeltaTotal | None:
        """Run the comparison, in the digesting thread, after the digests."""
        assert self._history is not None
        try:
            arrays = self._arrays
            return self._history.compare(arrays[before], arrays[slot], self._stop_comparing.is_set, self._wake_server)
        finally:
            self._wake_server()

    def _wake_server(self) -> None:
        server = self._server
        if server is not None:
            server.wake()

    def _layout_root(self, plan: Plan, version: int, snapshot: int, slot: int) -> str:
        """Return the layout root of the destination of `plan`, in the digesting thread.

        Raises:
            WeightsError: the plan is not one from this rank alone.
        """
        cache, arrays = self._source.cache(snapshot), self._arrays[slot]
        salt = version if self._digests == "sampled" else 0

        def digest(shard: int, box: Box) -> bytes:
            if not 0 <= shard < len(self._pieces) or not contains(self._pieces[shard].box, box):
                raise WeightsError(f"The plan to {plan.destination} reads {box} of shard {shard}, which is not here.")
            piece, array = self._pieces[shard], arrays[shard]
            if self._digests == "off":
                return b""
            compute = partial(digest_of_array, part_of(array, piece.box, box), self._digests, salt)
            return cache.get_or_compute((piece.names[0], box, self._digests, salt), compute)

        roots: list[str] = []
        for rank in plan.ranks:
            buckets = plan.of_destination(rank)
            if any(bucket.source_rank != self._rank for bucket in buckets):
                raise WeightsError(f"The plan to {plan.destination} reads from other ranks than rank {self._rank}.")
            transfers = [transfer for bucket in buckets for transfer in bucket.transfers]
            roots.append(rank_root((t.destination_shard, t.box, digest(t.source_shard, t.box)) for t in transfers))
        return layout_root(roots)

    def _digest(self, version: int, snapshot: int, secret: str, arrays: tuple[Array, ...]) -> RankOffer:
        """Digest a snapshot, in the digesting thread."""
        cache = self._source.cache(snapshot)
        digests: list[bytes] = []
        salt = version if self._digests == "sampled" else 0
        if self._digests != "off":
            for piece, array in zip(self._pieces, arrays, strict=True):
                key = (piece.names[0], piece.box, self._digests, salt)
                digests.append(cache.get_or_compute(key, partial(digest_of_array, array, self._digests, salt)))
        if self._digests == "full" and self._arena is not None:
            self._arena.set_digests(snapshot, digests)
        proofs = ((piece.names[0], piece.box, digest) for piece, digest in zip(self._pieces, digests, strict=False))
        return RankOffer(
            rank=self._rank,
            transport=self._transport,
            address=self._address,
            encrypted=self._encrypted,
            secret=secret,
            snapshot=snapshot,
            holds=self._holds,
            root=digest_of(b"%d" % version) if self._digests == "off" else root_of(proofs),
        )

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _copy(sources: Sequence[torch.Tensor], views: Sequence[torch.Tensor]) -> None:
    for view, source in zip(views, sources, strict=True):
        view.copy_(source)
