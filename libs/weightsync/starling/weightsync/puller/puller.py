"""The puller: brings a version into staging while the engine works, switches to it, and proves what the engine holds.

    stale ──pull──> pulling ──> staged ──switch──> current ──pull──> pulling ...
      ^                │           │
      └── any failure ─┘           └── a switch that breaks off ──> torn

A failed pull leaves the live tensors alone: the replica keeps its version. A pull `into` the live tensors needs no
staging, but it is torn while it runs and stays so when it fails. A torn replica holds parts of two versions and must
not generate before it has switched, or pulled in place, successfully.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final, Literal

import msgspec
import torch

from starling.common.errors import WeightsError
from starling.weightsync.memory.arrays import Array, Memory, allocate, lie_alike, packed_arrays
from starling.weightsync.memory.digests import DigestMode
from starling.weightsync.memory.pools import BufferPool
from starling.weightsync.plan.buckets import most_at_once
from starling.weightsync.plan.layout import Layout, check_layout, packed_offsets, pieces_of
from starling.weightsync.plan.offer import Offer, RankOffer, Transport, check_offer
from starling.weightsync.plan.planner import Plan
from starling.weightsync.puller.attestation import Attestation, cut_digests
from starling.weightsync.puller.fetch import BucketFetcher, FetchOptions, PullProgress, ReceivedDelta
from starling.weightsync.puller.relay import Relay
from starling.weightsync.puller.schedule import BucketRead, ReadSchedule, make_schedule
from starling.weightsync.puller.sources import SourceConnections
from starling.weightsync.tensors.views import array_of, live_view, live_views, packed_views, place_array, tensor_part
from starling.weightsync.transports.base import SourceConnection
from starling.weightsync.transports.deadline import Deadline, never

State = Literal["stale", "pulling", "staged", "current", "torn"]

MAX_THREADS: Final = 4
"""Most threads that copy, unpack and digest."""


class PullReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one pull did. `prepare_s`, `read_s` and `confirm_s` sum to `seconds`; the further seconds lie within
    `read_s`, and those of several threads may overlap."""

    version: int
    transport: str
    """Transports of the sources, joined by ``+`` where they differ."""
    lanes: tuple[str, ...]
    """Over what the bytes really went, for example ``cma/memory``."""
    num_buckets: int
    num_retries: int
    num_deltas: int
    """Boxes of which only what changed was sent."""
    size_bytes: int
    """What was brought up to date."""
    scratch_bytes: int
    """Memory that was there beside staging or the live tensors, for what must be unpacked."""
    bytes_by_source: dict[str, int]
    """What travelled, by the address that it came from."""
    seconds: float
    prepare_s: float
    """Checking plan and offer, and making ready."""
    read_s: float
    """Connecting, reading, unpacking and digesting."""
    unpack_s: float
    digest_s: float
    wait_s: float
    """Of `read_s`: nothing to do but wait for sources and threads."""
    confirm_s: float
    """Making sure that the snapshots stood still."""


class Puller:
    """The destination of one rank. `pull` runs in a thread of the caller's.

    Args:
        layout: what the replica holds.
        rank: which rank of the layout this process is.
        digests: how arrivals and the attestation are proven. ``off`` proves nothing: every attestation succeeds.
        relay: also offer what is being pulled to other replicas, over this transport.
        host: the address that they connect to.
        stall_s: how long a source may owe an answer before another one is tried, if there is another.
        scratch_bytes: memory for what must be unpacked; by default what the buckets under way need at most, see
            `peaks.destination_peak`.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        rank: int = 0,
        digests: DigestMode = "full",
        relay: Transport | None = None,
        host: str = "127.0.0.1",
        stall_s: float = 10.0,
        scratch_bytes: int | None = None,
    ) -> None:
        check_layout(layout)
        self._layout, self._rank, self._digests, self._stall_s = layout, rank, digests, stall_s
        self._pieces = pieces_of(layout, rank)
        _, self._extent_bytes = packed_offsets(piece.size_bytes for piece in self._pieces)
        self._relay = None if relay is None else Relay(self._pieces, rank, relay, host)
        self._staging: Memory | None = None if self._relay is None else self._relay.memory
        self._scratch_bytes = scratch_bytes
        self._scratch: BufferPool | None = None
        threads = min(MAX_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="weightsync-copy")
        self._wires = SourceConnections(self._pool)
        self._stage: ReadSchedule | None = None
        self._targets: tuple[Array | None, ...] = ()
        """What the stage fills."""
        self._held: dict[bool, tuple[Plan | None, list[int]]] = {}  # versions in staging, and in place (True)
        self._offer: Offer | None = None
        self._sent: dict[int, bytes] = {}
        self._busy = threading.Lock()
        self._staged_version = -1
        self.version = -1
        """The version that the live tensors hold, -1 before the first switch and while torn."""
        self.state: State = "stale"

    def pull(
        self,
        offer: Offer,
        plan: Plan,
        *,
        deadline_s: float,
        cancelled: Callable[[], bool] = never,
        into: Mapping[str, torch.Tensor] | None = None,
        relays: Sequence[Offer] = (),
        relays_first: bool = False,
        progress: Callable[[PullProgress], None] | None = None,
        announce: Callable[[Offer], None] | None = None,
    ) -> PullReport:
        """Bring the offered version into staging, or into live tensors, and prove what arrives.

        Args:
            offer: the version, from all source ranks that the plan reads.
            plan: made from the source's layout and this one.
            deadline_s: seconds from now by which it must be done.
            cancelled: asked between any two steps; True ends the pull.
            into: the live tensors, of an engine that is paused, to be written in place.
            relays: the same version offered by other replicas: they are asked for what its sources fail to deliver.
            relays_first: ask them before the sources.
            progress: told at most ten times a second how far the pull is.
            announce: given this replica's own offer as a relay, before the first byte has arrived.

        Raises:
            WeightsError: not done by the deadline, cancelled, refused, revoked, a peer lost, a digest that differs, a
                plan that does not fit, or another pull under way. With staging the live tensors keep their version.
        """
        if not self._busy.acquire(blocking=False):
            raise WeightsError("Another pull is under way.")
        before = self.state
        try:
            check_offer(offer)
            for other in relays:
                if other.version != offer.version:
                    raise WeightsError(f"A relay offers version {other.version}, not {offer.version}.")
            self._staged_version = -1
            if before != "torn":
                self.state = "pulling"
            deadline = Deadline(deadline_s, cancelled)
            report = self._pull(offer, plan, deadline, into, _stand_ins(relays), relays_first, progress, announce)
            if into is None:
                self._staged_version, self.state = offer.version, "staged"
            else:
                self.version, self.state = offer.version, "current"
            return report
        except BaseException:  # whatever ends a pull: its connections and its relay end too, and it is raised again
            if self.state == "pulling":
                self.state = "stale"
            if self._relay is not None:
                self._relay.void()
            self._wires.drop_all()
            raise
        finally:
            self._busy.release()

    def switch(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Copy the staged version into the live tensors, in place. Return the version.

        Raises:
            WeightsError: nothing is staged, a pull is under way, or the tensors do not fit the layout; then nothing
                was touched.
        """
        with self._switching() as staged:
            live = live_views(self._layout, self._rank, tensors)
            self._tear()
            for destination, source in zip(live, staged, strict=True):
                destination.copy_(source)
        return self.version

    def switch_in_turns(self, turns: Iterable[Mapping[str, torch.Tensor]], offer: Offer) -> str:
        """Switch where what the layout describes is there only for a moment, and attest it: an engine repacks it.

        Args:
            turns: tensors by the names of storages, each storage once; those of a turn have been filled, and what they
                hold been digested, when the next is asked for.
            offer: the version that is staged.

        Returns: as `attest`.

        Raises:
            WeightsError: as `switch` and `attest`, or a storage that came in no turn; then it is torn.
        """
        with self._switching() as staged:
            attestation = self._attestation(offer)
            storages = [shard.storage for shard in self._layout.ranks[self._rank].shards]
            left = set(range(len(storages)))
            for tensors in turns:
                self._tear()
                mine = [index for index in left if storages[index] in tensors]
                live = {index: live_view(self._layout, self._rank, index, tensors) for index in mine}
                for index, destination in live.items():
                    destination.copy_(staged[index])
                attestation.take_shards(live)
                left.difference_update(mine)
            if left:
                raise WeightsError(f"Nothing was given for {storages[min(left)]} of {self._layout.replica}.")
            sent = self._sent  # the next pull may begin at once, and has another
        return attestation.root(sent)

    def attest(self, tensors: Mapping[str, torch.Tensor], offer: Offer) -> str:
        """Return the root of what the live tensors really hold of the version of `offer`.

        It equals `offer.root` exactly when every box that the plan brings is, bit for bit, what its source sent.

        Raises:
            WeightsError: that version is not the one pulled last.
        """
        attestation = self._attestation(offer)
        live = live_views(self._layout, self._rank, tensors)
        list(self._pool.map(lambda index: attestation.take_bucket(index, live), range(len(self._sent))))
        return attestation.root(self._sent)

    @contextmanager
    def _switching(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """Hold what is staged, to be put into the live tensors within."""
        if not self._busy.acquire(blocking=False):  # waiting would pause the engine for the length of a pull
            raise WeightsError("There is no staged version to switch to: a pull is under way.")
        try:
            if self._staged_version < 0 or self._staging is None:
                raise WeightsError("There is no staged version to switch to: pull first.")
            with torch.no_grad():
                yield packed_views(self._layout, self._rank, self._staging)
            self.version, self._staged_version = self._staged_version, -1
            self.state = "current"
        finally:
            self._busy.release()

    def _tear(self) -> None:
        """From here on live tensors are written to."""
        self.state, self.version = "torn", -1
        self._held.pop(True, None)

    def _attestation(self, offer: Offer) -> Attestation:
        stage = self._stage
        if stage is None or self._offer != offer or len(self._sent) != len(stage.reads):
            raise WeightsError(f"Version {offer.version} is not the one pulled last: there is nothing to attest.")
        return Attestation(stage, self._pieces, self._digests, offer)

    def close(self) -> None:
        """Close every connection; waits for a pull under way to end, which its deadline ensures."""
        with self._busy:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._wires.close()
            if self._relay is not None:
                self._staging, self._targets, self._stage = None, (), None
                self._relay.close()

    def _pull(
        self,
        offer: Offer,
        plan: Plan,
        deadline: Deadline,
        into: Mapping[str, torch.Tensor] | None,
        stand_ins: Sequence[RankOffer],
        stand_ins_first: bool,
        progress: Callable[[PullProgress], None] | None,
        announce: Callable[[Offer], None] | None,
    ) -> PullReport:
        begin = time.perf_counter()
        live = None if into is None else live_views(self._layout, self._rank, into)
        stage = self._make_stage(plan, live)
        peers = self._peers(stage, offer, stand_ins, stand_ins_first)
        self._offer, self._sent = offer, {}
        bases = self._bases_of(stage, in_place=into is not None)
        relay = self._relay if into is None else None
        if relay is not None:
            relay.begin(offer, stage, self._digests, deadline, announce, bases)

        def place(read: BucketRead, index: int, array: Array) -> None:
            assert live is not None
            shard = read.shards[index]
            place_array(tensor_part(live[shard], self._pieces[shard].box, read.boxes[index].box), array)

        def arrived(index: int, digests: bytes, deltas: Sequence[ReceivedDelta]) -> None:
            self._sent[index] = digests
            if relay is not None:
                relay.arrived(stage.reads[index], cut_digests(digests, len(stage.reads[index].boxes)), deltas)

        if live is not None:
            self.state, self.version = "torn", -1
        scratch = self._make_scratch(stage, peers)
        terms = FetchOptions(
            digests=self._digests,
            version=offer.version,
            stall_s=self._stall_s,
            place=place,
            arrived=arrived,
            delta_bytes=plan.peak_bytes(self._rank, in_place=True),
            report=progress,
        )
        transfer = BucketFetcher(stage, peers, scratch, self._pool, terms, self._wires.numbers, bases)
        prepared = time.perf_counter()
        transfer.run(deadline)
        end = time.perf_counter()
        work = transfer.work
        addresses = {peer.key: peer.offer for group in peers.values() for peer in group}
        return PullReport(
            version=offer.version,
            transport="+".join(sorted({addresses[key].transport for key in work.bytes_by_source})),
            lanes=tuple(sorted({lane for lanes in work.lanes.values() for lane in lanes})),
            num_buckets=len(stage.reads),
            num_retries=work.num_retries,
            num_deltas=work.num_deltas,
            size_bytes=stage.total_bytes,
            scratch_bytes=scratch.size_bytes,
            bytes_by_source={addresses[key].address: size for key, size in work.bytes_by_source.items()},
            seconds=end - begin,
            prepare_s=prepared - begin,
            read_s=end - prepared - work.confirm_s,
            unpack_s=work.unpack_s,
            digest_s=work.digest_s,
            wait_s=work.wait_s,
            confirm_s=work.confirm_s,
        )

    def _bases_of(self, stage: ReadSchedule, *, in_place: bool) -> list[int]:
        """Return the version that each read's boxes hold; the transfer keeps it up to date."""
        plan, versions = self._held.get(in_place, (None, [self.version if in_place else -1]))
        if plan != stage.plan:  # cut in another way: still known if everything is of one version
            version = versions[0] if len(set(versions)) == 1 else -1
            versions = [version] * len(stage.reads)
        self._held[in_place] = (stage.plan, versions)
        return versions

    def _make_stage(self, plan: Plan, live: Sequence[torch.Tensor] | None) -> ReadSchedule:
        """Return what is to be done: the same as for the pull before, unless the plan or the tensors are others."""
        targets: tuple[Array | None, ...]
        if live is not None:
            targets = tuple(array_of(tensor) for tensor in live)
            if self._relay is None:
                self._held.pop(False, None)
                self._staging = None  # a replica whose engine is paused for its pulls needs none
        else:
            if self._staging is None:
                self._staging = allocate(self._extent_bytes)
            targets = packed_arrays(self._pieces, self._staging)
        stage = self._stage
        if stage is None or (stage.plan is not plan and stage.plan != plan) or not lie_alike(targets, self._targets):
            stage = make_schedule(plan, self._layout, self._rank, targets)
            self._stage, self._targets = stage, targets
        return stage

    def _make_scratch(self, stage: ReadSchedule, peers: Mapping[int, Sequence[SourceConnection]]) -> BufferPool:
        scatters = all(peer.wire.scatters for group in peers.values() for peer in group)
        rooms = [read.scratch_bytes(scatters=scatters) for read in stage.reads]
        wanted, largest = most_at_once(rooms, stage.plan.buckets_in_flight), max(rooms, default=0)
        if self._scratch_bytes is not None:
            wanted = self._scratch_bytes
        if wanted < largest:
            raise WeightsError(f"{wanted} bytes of scratch are too few: a bucket of this plan needs {largest}.")
        if self._scratch is None or self._scratch.size_bytes != wanted:
            self._scratch = None  # the old memory goes before the new comes
            self._scratch = BufferPool(wanted)
        self._scratch.clear()
        return self._scratch

    def _peers(
        self, stage: ReadSchedule, offer: Offer, stand_ins: Sequence[RankOffer], stand_ins_first: bool
    ) -> dict[int, list[SourceConnection]]:
        """Return whom to ask for the boxes of each source rank: it, its twins, and relays."""
        ranks = {rank.rank: rank for rank in offer.ranks}
        groups: dict[int, list[RankOffer]] = {}
        for number in stage.source_ranks:
            planned = ranks.get(number)
            if planned is None:
                raise WeightsError(f"The plan reads from rank {number} of {stage.plan.source}, which offers nothing.")
            twins = [rank for rank in offer.ranks if rank is not planned and rank.holds == planned.holds]
            own = [planned, *twins]
            groups[number] = [*stand_ins, *own] if stand_ins_first else [*own, *stand_ins]
        return self._wires.peers(groups)


def _stand_ins(relays: Sequence[Offer]) -> list[RankOffer]:
    return [rank for relay in relays for rank in relay.ranks]
