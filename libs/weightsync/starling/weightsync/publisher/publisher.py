"""The publisher of one rank: copies its shards into a snapshot, which readers pull while training continues."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Final, get_args

import torch

from starling.common.errors import WeightsError
from starling.weightsync.memory.arena import Arena, WhenBusy
from starling.weightsync.memory.arrays import Array, packed_arrays
from starling.weightsync.memory.device_memory import SnapshotPlace, SnapshotPolicy
from starling.weightsync.memory.digests import DigestMode
from starling.weightsync.offers.offer import LayoutPart, Offer, RankOffer, Transport, holds_of
from starling.weightsync.plan.layout import Layout, check_layout, pieces_of
from starling.weightsync.plan.planner import Plan
from starling.weightsync.publisher.comparison import Comparison
from starling.weightsync.publisher.delta_history import DeltaHistory
from starling.weightsync.publisher.digests import SnapshotDigests
from starling.weightsync.publisher.published import DIGEST_TIMEOUT_S, PublishedSnapshot
from starling.weightsync.publisher.snapshot_writer import MOVE_TIMEOUT_S, SnapshotWriter
from starling.weightsync.quantise.recipe import QuantRecipe
from starling.weightsync.tensors.quantiser import MaximaExchange, Quantiser
from starling.weightsync.tensors.views import live_views
from starling.weightsync.transports.endpoints import is_loopback
from starling.weightsync.transports.registry import serve
from starling.weightsync.transports.source import SnapshotSource

CLOSE_TIMEOUT_S: Final = 5.0
FROM_DEVICE: Final[tuple[Transport, ...]] = ("local", "ucx", "nixl")
"""Transports whose readers get boxes from memory of the source's device."""
DELTA_VERSIONS: Final = 2
MIN_ROOT_S: Final = 2.0
ROOT_SHARE: Final = 6.0
"""Longest that the digesting thread computes one layout root: so long, and so many times as long as the own digests of
the version took, whichever is longer. A rollout chooses its layout; one whose root is left out pulls from a policy."""


@dataclass(frozen=True)
class _NewestVersion:
    """The newest version; before the first one there is none."""

    version: int = -1
    snapshot: int = 0
    slot: int = -1
    layout_parts: dict[str, Future[LayoutPart]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Digesting:
    """What the digesting thread computes from a slot."""

    futures: list[Future[Any]]
    end: threading.Event
    """Ends the computation of its layout roots."""


class Publisher:
    """Offers the shards of one rank, version by version, from two alternating snapshots.

    Training waits for the local copy into a snapshot only, unless both snapshots are being read. Then `when_busy`
    decides: ``revoke`` waits for a reader to finish, at most `read_timeout_s`, and then revokes the older snapshot,
    whose readers get a `WeightsError` and keep the version that they have; it waits no more for a replica that was late
    three times within an hour. ``wait`` waits as long and then raises `SnapshotsBusyError`; ``skip`` raises it at once.
    When it is raised, nothing has changed.

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
        snapshots: where a version is copied while training waits, see `SnapshotPolicy`. Each version that goes by way
            of a device takes as much of its memory as this rank publishes, until it has moved to the host. With
            ``device`` and ``local``, ``ucx`` or ``nixl`` it stays: two versions, until the publisher is closed.

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
        snapshots: SnapshotPolicy = "auto",
    ) -> None:
        check_layout(layout)
        if transport not in get_args(Transport):
            raise WeightsError(
                f"There is no transport {transport!r} of a publisher; choose one of {', '.join(get_args(Transport))}."
            )
        self._layout, self._rank = layout, rank
        self._read_timeout_s, self._when_busy = read_timeout_s, when_busy
        self._quantiser = Quantiser(layout, rank, quantise, exchange) if quantise else None
        self.layout = layout = self._quantiser.layout if self._quantiser else layout
        """Layout of what is published: the source of plans."""
        pieces = pieces_of(layout, rank)
        self._holds = holds_of(pieces)
        self._arena: Arena | None = Arena(pieces)
        stays = snapshots == "device" and transport in FROM_DEVICE
        self._writer = SnapshotWriter(layout, rank, self._arena, snapshots, stays=stays)
        self._arrays = tuple(packed_arrays(pieces, slot) for slot in self._arena.slots)
        source = SnapshotSource(self._arena, pieces)
        source.device_memory = self._writer.memory
        self._readers = source.readers
        self._digests = SnapshotDigests(source, pieces, rank, len(layout.ranks), digests)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weightsync-digest")
        self._digesting: dict[int, _Digesting] = {}
        """By slot."""
        self._root_s = 0.0
        """How long the digesting thread took for the root of the newest version."""
        self._newest = _NewestVersion()
        if delta_versions is None:
            delta_versions = 0 if transport == "local" or is_loopback(host) else DELTA_VERSIONS
        history = DeltaHistory(pieces, delta_versions, self._arena.extent_bytes, self._arena.is_readable)
        if delta_versions > 0:
            source.deltas = history
        try:
            self._serving = serve(source, transport, host, encrypted=encrypt)
        except WeightsError:
            self._arena.close()
            raise
        self._comparison: Comparison | None = None
        if delta_versions > 0:
            self._comparison = Comparison(history, self._pool, self._serving.server.wake)
        atexit.register(self.close)

    @property
    def transport(self) -> Transport:
        """The transport in use: ``tcp`` where ``ucx`` was requested and is not available."""
        return self._serving.transport

    @property
    def snapshot_place(self) -> SnapshotPlace:
        """Where the last version was copied while training waited."""
        return self._writer.place

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Apply the policy of snapshots for these tensors now, and not with the first version.

        Raises:
            WeightsError: the tensors do not fit the layout, or the policy is not available for them on this host.
        """
        self._writer.prepare(_device_of(live_views(self._layout, self._rank, tensors)))

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
                rank did not exchange its maxima, the policy of snapshots is not available for these tensors, or serving
                has failed.
        """
        begin = time.perf_counter()
        before = self._newest
        if self._arena is None:
            raise WeightsError("The publisher is closed.")
        if self._serving.server.failure:
            raise WeightsError(f"Serving weights has failed: {self._serving.server.failure}.")
        if version <= before.version:
            raise WeightsError(f"Version {version} cannot follow version {before.version}: versions grow from 0.")
        sources = live_views(self._layout, self._rank, tensors)
        device = _device_of(sources)
        self._writer.prepare(device)
        # Before a slot is claimed: where claiming fails on one rank, the others do not wait for its maxima.
        fill = self._quantiser.measured(sources) if self._quantiser else partial(_copy, sources)
        slot = self._arena.claim(self._read_timeout_s, self._when_busy, self._readers)
        self._await_digests(slot)
        if self._comparison is not None:
            self._comparison.interrupt()
        moved = self._writer.write(slot, fill, device)
        memory = self._writer.memory(slot)
        snapshot, secret = self._arena.commit(slot, None if memory is None else memory.handle)
        base = before.version if before.slot not in (-1, slot) else -1
        self._newest = _NewestVersion(version, snapshot, slot)
        if self._comparison is not None:
            self._comparison.begin(snapshot, version, base)
        offer = self._pool.submit(self._make_offer, self._newest, secret, moved)
        self._digesting[slot] = _Digesting([offer], threading.Event())
        self.add_layout_roots(root_plans or {})  # before the comparison, for which the offer does not wait
        changes = None
        if self._comparison is not None and base >= 0:
            changes = self._comparison.start(self._arrays[before.slot], self._arrays[slot])
        return PublishedSnapshot(version, time.perf_counter() - begin, offer, self._newest.layout_parts, changes)

    def add_layout_roots(self, root_plans: Mapping[str, Plan]) -> None:
        """Compute these layout roots of the newest version, too; see `snapshot`. Known keys are not computed again.

        Raises:
            WeightsError: nothing was published yet, or the publisher is closed.
        """
        newest = self._newest
        if newest.slot < 0 or self._arena is None:
            raise WeightsError("There is no version whose layout roots could be computed.")
        digesting = self._digesting[newest.slot]
        for key, plan in root_plans.items():
            if key not in newest.layout_parts:
                future = self._pool.submit(self._layout_part, plan, newest, self._arrays[newest.slot], digesting.end)
                newest.layout_parts[key] = future
                digesting.futures.append(future)

    def settle(self) -> None:
        """Wait until no snapshot is in memory of a device, which others may then use, but for those that stay there.

        Raises:
            WeightsError: one did not move to the host in time.
        """
        self._writer.settle()

    def close(self, deadline_s: float = CLOSE_TIMEOUT_S) -> None:
        """End serving and free the snapshots. May be called twice.

        Raises:
            WeightsError: a serving thread did not end within `deadline_s`.
        """
        atexit.unregister(self.close)
        arena, self._arena = self._arena, None
        if arena is None:
            return
        if self._comparison is not None:
            self._comparison.stop()
        for digesting in self._digesting.values():
            digesting.end.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._arrays = ()
        self._digesting.clear()
        try:
            self._serving.server.close(deadline_s)
        finally:
            arena.close()  # first, so that readers who still copy from the device find it revoked
            self._writer.close()

    def _await_digests(self, slot: int) -> None:
        """Wait until the digesting thread no longer reads the slot, whose layout roots are needed no more."""
        digesting = self._digesting.pop(slot, None)
        if digesting is None:
            return
        digesting.end.set()
        for future in digesting.futures:
            if not future.cancel():
                future.exception(DIGEST_TIMEOUT_S)

    def _make_offer(self, published: _NewestVersion, secret: str, moved: Future[None] | None) -> RankOffer:
        """Digest a snapshot and return its offer, in the digesting thread, once it has `moved` from its device."""
        if moved is not None:
            moved.result(MOVE_TIMEOUT_S)
        begin = time.monotonic()
        root = self._digests.root(published.version, published.snapshot, self._arrays[published.slot])
        self._root_s = time.monotonic() - begin
        return self._serving.offer(
            rank=self._rank, snapshot=published.snapshot, secret=secret, holds=self._holds, root=root
        )

    def _layout_part(
        self, plan: Plan, published: _NewestVersion, arrays: Sequence[Array], end: threading.Event
    ) -> LayoutPart:
        """Compute this rank's part of a layout root, in the digesting thread."""
        latest = time.monotonic() + max(MIN_ROOT_S, ROOT_SHARE * self._root_s)
        return self._digests.layout_part(
            plan,
            published.version,
            published.snapshot,
            arrays,
            stopped=lambda: end.is_set() or time.monotonic() > latest,
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


def _device_of(sources: Sequence[torch.Tensor]) -> torch.device:
    """Return the device that tensors are on; the first one that is not the CPU where they are on several."""
    devices = [source.device for source in sources]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
