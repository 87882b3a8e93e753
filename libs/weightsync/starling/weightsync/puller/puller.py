"""The puller of one rank: brings a version into staging while the engine works, switches to it, and attests it.

    stale ──pull──> pulling ──> staged ──switch──> current ──pull──> pulling ...
      ^                │           │
      └── any failure ─┘           └── a switch that breaks off ──> torn

A failed pull leaves the live tensors alone: the replica keeps its version. A pull `into` the live tensors needs no
staging, but the replica is torn while it runs and stays so when it fails. A torn replica holds parts of two versions
and must not generate before it has switched, or pulled in place, successfully.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final, Literal

import torch

from starling.common.errors import WeightsError
from starling.weightsync.memory.arrays import Array, Memory, allocate, packed_arrays, same_arrays
from starling.weightsync.memory.digests import DigestMode
from starling.weightsync.memory.jobs import is_small
from starling.weightsync.memory.pools import BufferPool
from starling.weightsync.offers.offer import Offer, RankOffer, check_offer, holds_of
from starling.weightsync.plan.buckets import most_at_once
from starling.weightsync.plan.layout import Layout, check_layout, packed_offsets, pieces_of
from starling.weightsync.plan.planner import Plan
from starling.weightsync.puller.attestation import Attestation, AttestedRoots, split_digests
from starling.weightsync.puller.deadline import Deadline, never
from starling.weightsync.puller.fetch import BucketFetcher, FetchOptions, FetchStats, ReceivedDelta
from starling.weightsync.puller.relay import Relay
from starling.weightsync.puller.report import PullProgress, PullReport, SourceRead
from starling.weightsync.puller.schedule import BucketRead, ReadSchedule, make_schedule
from starling.weightsync.puller.sources import SourceConnection, SourceConnections
from starling.weightsync.tensors.views import array_of, live_view, live_views, packed_views, place_array, tensor_part
from starling.weightsync.transports.endpoints import ServingOptions

PullerState = Literal["stale", "pulling", "staged", "current", "torn"]

MAX_THREADS: Final = 4
"""Maximum number of threads that copy, unpack and digest."""


class Puller:
    """The destination of one rank. Call `pull` in a dedicated thread.

    Args:
        layout: what the replica holds.
        rank: which rank of the layout this process is.
        digests: which bytes arrivals and the attestation are verified by. ``off`` verifies nothing: every attestation
            succeeds.
        serving: how a pull with `announce` also offers what arrives to other replicas; nothing is served before the
            first such pull. Only ``tcp`` can encrypt. What this puller gets is encrypted as its source offers it.
        stall_s: how long a source may owe an answer before a fallback source is tried, if there is one.
        buffer_bytes: size of the buffer pool for what must be unpacked; by default what the buckets in flight need at
            most, see `costs.estimate.destination_peak`.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        rank: int = 0,
        digests: DigestMode = "full",
        serving: ServingOptions | None = None,
        stall_s: float = 10.0,
        buffer_bytes: int | None = None,
    ) -> None:
        check_layout(layout)
        self._layout, self._rank, self._digests, self._stall_s = layout, rank, digests, stall_s
        self._pieces = pieces_of(layout, rank)
        self._holds = holds_of(self._pieces)
        _, self._extent_bytes = packed_offsets(piece.size_bytes for piece in self._pieces)
        self._serving = serving
        self._relay: Relay | None = None
        self._staging: Memory | None = None
        self._buffer_bytes = buffer_bytes
        self._buffers: BufferPool | None = None
        threads = min(MAX_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="weightsync-copy")
        self._connections = SourceConnections(self._pool)
        self._schedule: ReadSchedule | None = None
        self._targets: tuple[Array | None, ...] = ()
        """The arrays that the schedule fills."""
        self._read_versions: dict[bool, tuple[Plan | None, list[int]]] = {}
        """For staging (False) and in place (True): the version that the boxes of each read of a plan hold."""
        self._offer: Offer | None = None
        self._sent: dict[int, bytes] = {}
        """For each read of the last pull the digests that its source sent."""
        self._busy = threading.Lock()
        self._staged_version = -1
        self.version = -1
        """The version that the live tensors hold, -1 before the first switch and while torn."""
        self.state: PullerState = "stale"

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
        """Bring the offered version into staging, or into live tensors, and verify what arrives.

        Args:
            offer: the version, from all source ranks that the plan reads.
            plan: computed from the source's layout and this one.
            deadline_s: seconds from now by which it must be done.
            cancelled: checked every few milliseconds; True ends the pull.
            into: the live tensors, of an engine that is paused, to be written in place.
            relays: offers of the same version by other replicas: fallback sources. Of one of this layout only the same
                rank is read.
            relays_first: prefer them to the sources.
            progress: called at most ten times a second.
            announce: called with this replica's own offer as a relay, before the first byte has arrived; not in a pull
                `into` live tensors.

        Raises:
            WeightsError: not done by the deadline, cancelled, refused, revoked, a connection lost, a wrong digest, a
                plan that does not fit, or another pull in progress. With staging the live tensors keep their version.
        """
        check_offer(offer)
        for other in relays:
            if other.version != offer.version:
                raise WeightsError(f"A relay offers version {other.version}, not {offer.version}.")
        with self._pulling():
            deadline = Deadline(deadline_s, cancelled)
            fallbacks = [rank for relay in relays for rank in self._ranks_of(relay)]
            report = self._pull(offer, plan, deadline, into, fallbacks, relays_first, progress, announce)
            if into is None:
                self._staged_version, self.state = offer.version, "staged"
            else:
                self.version, self.state = offer.version, "current"
        return report

    def switch(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Copy the staged version into the live tensors, in place. Return the version.

        Raises:
            WeightsError: nothing is staged, a pull is in progress, or the tensors do not fit the layout; then nothing
                was written.
        """
        with self._switching() as staged:
            live = live_views(self._layout, self._rank, tensors)
            self._mark_torn()
            for destination, source in zip(live, staged, strict=True):
                destination.copy_(source)
        return self.version

    def switch_in_parts(
        self, parts: Iterable[Mapping[str, torch.Tensor]], offer: Offer, root_plan: Plan | None = None
    ) -> AttestedRoots:
        """Switch and attest part by part, for an engine that repacks each part after it was filled.

        Args:
            parts: tensors by the names of storages, each storage once; the tensors of a part have been filled and
                digested when the next part is requested.
            offer: the version that is staged.
            root_plan: as in `attest_roots`.

        Returns: as `attest_roots`.

        Raises:
            WeightsError: as `switch` and `attest_roots`, or a storage that was in no part; then the replica is torn.
        """
        with self._switching() as staged:
            attestation = self._attestation(offer, root_plan)
            storages = [shard.storage for shard in self._layout.ranks[self._rank].shards]
            left = set(range(len(storages)))
            for tensors in parts:
                self._mark_torn()
                mine = [index for index in left if storages[index] in tensors]
                live = {index: live_view(self._layout, self._rank, index, tensors) for index in mine}
                for index, destination in live.items():
                    destination.copy_(staged[index])
                attestation.add_shards(live)
                left.difference_update(mine)
            if left:
                raise WeightsError(f"Nothing was given for {storages[min(left)]} of {self._layout.replica}.")
            sent = self._sent  # the next pull, which may begin at once, replaces it
        return attestation.roots(sent)

    def attest(self, tensors: Mapping[str, torch.Tensor], offer: Offer) -> str:
        """Return the root of what the live tensors really hold of the version of `offer`.

        It equals `offer.root` exactly when every box that the plan delivers is, bit for bit, what its source sent.

        Raises:
            WeightsError: that version is not the one pulled last.
        """
        return self.attest_roots(tensors, offer).root

    def attest_roots(
        self, tensors: Mapping[str, torch.Tensor], offer: Offer, root_plan: Plan | None = None
    ) -> AttestedRoots:
        """Return the roots of what the live tensors really hold of the version of `offer`.

        Args:
            tensors: the live tensors.
            offer: the version that was pulled last.
            root_plan: the plan from the publisher's layout to this one, whose boxes the layout root covers; by default
                the plan of the pull. Boxes that the pull has, too, are digested once.

        Raises:
            WeightsError: that version is not the one pulled last, or `root_plan` is not for this layout.
        """
        attestation = self._attestation(offer, root_plan)
        live = live_views(self._layout, self._rank, tensors)
        mapped = map if is_small(len(self._pieces), self._extent_bytes) else self._pool.map
        list(mapped(lambda index: attestation.add_bucket(index, live), range(len(self._sent))))
        list(mapped(lambda shard: attestation.add_others(shard, live[shard]), attestation.shards_of_others))
        return attestation.roots(self._sent)

    def _ranks_of(self, relay: Offer) -> Sequence[RankOffer]:
        """Return the ranks of a relay to read from: the one with the boxes of this rank, or all if none has them."""
        equal = [rank for rank in relay.ranks if rank.holds == self._holds]
        return equal[:1] or relay.ranks

    @contextmanager
    def _pulling(self) -> Iterator[None]:
        """Mark what was staged as gone; end the pull's connections and its relay if it fails within the context."""
        if not self._busy.acquire(blocking=False):
            raise WeightsError("Another pull is in progress.")
        try:
            self._staged_version = -1
            if self.state != "torn":
                self.state = "pulling"
            yield
        except BaseException:  # whatever it is: clean up, and re-raise
            if self.state == "pulling":
                self.state = "stale"
            if self._relay is not None:
                self._relay.revoke()
            self._connections.drop_all()
            raise
        finally:
            self._busy.release()

    @contextmanager
    def _switching(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield the staged tensors, to be copied into the live ones within the context."""
        if not self._busy.acquire(blocking=False):  # waiting would pause the engine for the length of a pull
            raise WeightsError("There is no staged version to switch to: a pull is in progress.")
        try:
            if self._staged_version < 0 or self._staging is None:
                raise WeightsError("There is no staged version to switch to: pull first.")
            with torch.no_grad():
                yield packed_views(self._layout, self._rank, self._staging)
            self.version, self._staged_version = self._staged_version, -1
            self.state = "current"
        finally:
            self._busy.release()

    def _mark_torn(self) -> None:
        """Record that live tensors are written from now on."""
        self.state, self.version = "torn", -1
        self._read_versions.pop(True, None)

    def _attestation(self, offer: Offer, root_plan: Plan | None) -> Attestation:
        schedule = self._schedule
        if schedule is None or self._offer != offer or len(self._sent) != len(schedule.reads):
            raise WeightsError(f"Version {offer.version} is not the one pulled last: there is nothing to attest.")
        root_schedule = schedule
        if root_plan is not None and root_plan != schedule.plan:
            root_schedule = make_schedule(root_plan, self._layout, self._rank, (None,) * len(self._pieces))
        return Attestation(schedule, self._pieces, self._digests, offer, root_schedule)

    def close(self) -> None:
        """Close every connection; waits for a pull in progress to end, which its deadline ensures."""
        with self._busy:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._connections.close()
            if self._relay is not None:
                self._staging, self._targets, self._schedule = None, (), None
                self._relay.close()

    def _pull(
        self,
        offer: Offer,
        plan: Plan,
        deadline: Deadline,
        into: Mapping[str, torch.Tensor] | None,
        fallbacks: Sequence[RankOffer],
        fallbacks_first: bool,
        progress: Callable[[PullProgress], None] | None,
        announce: Callable[[Offer], None] | None,
    ) -> PullReport:
        begin = time.perf_counter()
        live = None if into is None else live_views(self._layout, self._rank, into)
        if live is None and announce is not None:
            self._make_relay()
        schedule = self._make_schedule(plan, live)
        sources = self._sources(schedule, offer, fallbacks, fallbacks_first)
        self._offer, self._sent = offer, {}
        bases = self._bases_of(schedule, in_place=into is not None)
        relay = self._relay if into is None else None
        if relay is not None:
            relay.begin(offer, schedule, self._digests, deadline, announce, bases)

        def tensor(read: BucketRead, index: int) -> torch.Tensor:
            assert live is not None
            shard = read.shards[index]
            return tensor_part(live[shard], self._pieces[shard].box, read.boxes[index].box)

        def place(read: BucketRead, index: int, array: Array) -> None:
            place_array(tensor(read, index), array)

        def arrived(index: int, digests: bytes, deltas: Sequence[ReceivedDelta]) -> None:
            self._sent[index] = digests
            if relay is not None:
                read = schedule.reads[index]
                relay.arrived(read, split_digests(digests, len(read.boxes)), deltas)

        def requested_whole(index: int) -> None:
            if relay is not None:
                relay.expect_whole(schedule.reads[index])

        if live is not None:
            self.state, self.version = "torn", -1
            for device in {each.device for each in live if each.device.type == "cuda"}:
                torch.cuda.synchronize(device)  # transports write beside torch's streams
        buffers = self._make_buffers(schedule, sources)
        options = FetchOptions(
            digests=self._digests,
            version=offer.version,
            rank=self._rank,
            stall_s=self._stall_s,
            place=place,
            tensor=tensor,
            arrived=arrived,
            requested_whole=requested_whole,
            delta_bytes=plan.peak_bytes(self._rank, in_place=True),
            report=progress,
        )
        fetcher = BucketFetcher(schedule, sources, buffers, self._pool, options, self._connections.numbers, bases)
        prepared = time.perf_counter()
        fetcher.run(deadline)
        times = (begin, prepared, time.perf_counter())
        return _report((offer.version, self._rank), schedule, sources, buffers, fetcher.stats, times)

    def _make_relay(self) -> None:
        """Serve the staging memory, from the first pull on that is announced; without `serving` it is private."""
        if self._relay is None and self._serving is not None and self._serving.can_relay:
            self._staging, self._targets, self._schedule = None, (), None  # free it before the arena is allocated
            self._read_versions.pop(False, None)
            self._relay = Relay(self._pieces, self._rank, self._serving)
            self._staging = self._relay.memory

    def _bases_of(self, schedule: ReadSchedule, *, in_place: bool) -> list[int]:
        """Return the version that each read's boxes hold; the fetcher keeps the list up to date."""
        plan, versions = self._read_versions.get(in_place, (None, [self.version if in_place else -1]))
        if plan != schedule.plan:  # other buckets: their version is known only if all old ones have the same
            version = versions[0] if len(set(versions)) == 1 else -1
            versions = [version] * len(schedule.reads)
        self._read_versions[in_place] = (schedule.plan, versions)
        return versions

    def _make_schedule(self, plan: Plan, live: Sequence[torch.Tensor] | None) -> ReadSchedule:
        """Return the schedule of the previous pull, or a new one if the plan or the destination's memory is another."""
        targets: tuple[Array | None, ...]
        if live is not None:
            targets = tuple(array_of(tensor) for tensor in live)
            if self._relay is None:
                self._read_versions.pop(False, None)
                self._staging = None  # a replica whose engine is paused for its pulls needs none
        else:
            if self._staging is None:
                self._staging = allocate(self._extent_bytes)
            targets = packed_arrays(self._pieces, self._staging)
        schedule = self._schedule
        same_plan = schedule is not None and (schedule.plan is plan or schedule.plan == plan)
        if schedule is None or not same_plan or not same_arrays(targets, self._targets):
            schedule = make_schedule(plan, self._layout, self._rank, targets)
            self._schedule, self._targets = schedule, targets
        return schedule

    def _make_buffers(self, schedule: ReadSchedule, sources: Mapping[int, Sequence[SourceConnection]]) -> BufferPool:
        scatters = all(source.client.scatters for group in sources.values() for source in group)
        sizes = [read.buffer_bytes(scatters=scatters) for read in schedule.reads]
        wanted, largest = most_at_once(sizes, schedule.plan.buckets_in_flight), max(sizes, default=0)
        if self._buffer_bytes is not None:
            wanted = self._buffer_bytes
        if wanted < largest:
            raise WeightsError(f"A buffer pool of {wanted} bytes is too small: a bucket of this plan needs {largest}.")
        if self._buffers is None or self._buffers.size_bytes != wanted:
            self._buffers = None  # free the old memory before the new one is allocated
            self._buffers = BufferPool(wanted)
        self._buffers.clear()
        return self._buffers

    def _sources(
        self, schedule: ReadSchedule, offer: Offer, fallbacks: Sequence[RankOffer], fallbacks_first: bool
    ) -> dict[int, list[SourceConnection]]:
        """Return the connections for the boxes of each source rank: to it, to ranks with the same boxes, to relays."""
        ranks = {rank.rank: rank for rank in offer.ranks}
        groups: dict[int, list[RankOffer]] = {}
        for number in schedule.source_ranks:
            planned = ranks.get(number)
            if planned is None:
                raise WeightsError(
                    f"The plan reads from rank {number} of {schedule.plan.source}, which offers nothing."
                )
            copies = [rank for rank in offer.ranks if rank is not planned and rank.holds == planned.holds]
            own = [planned, *copies]
            places = {(rank.transport, rank.address) for rank in own}  # connections are kept by them
            others = [rank for rank in fallbacks if (rank.transport, rank.address) not in places]
            groups[number] = [*others, *own] if fallbacks_first else [*own, *others]
        return self._connections.connections(groups)


def _report(
    pulled: tuple[int, int],
    schedule: ReadSchedule,
    sources: Mapping[int, Sequence[SourceConnection]],
    buffers: BufferPool,
    stats: FetchStats,
    times: tuple[float, float, float],
) -> PullReport:
    """Return the report of a pull, of a version by a rank, that began, was prepared and ended at `times`."""
    version, rank = pulled
    begin, prepared, end = times
    offers = {source.key: source.offer for group in sources.values() for source in group}
    return PullReport(
        version=version,
        transport="+".join(sorted({offers[key].transport for key in stats.bytes_by_source})),
        lanes=tuple(sorted({lane for lanes in stats.lanes.values() for lane in lanes})),
        num_buckets=len(schedule.reads),
        num_retries=stats.num_retries,
        num_deltas=stats.num_deltas,
        size_bytes=schedule.total_bytes,
        buffer_bytes=buffers.size_bytes,
        bytes_by_source={offers[key].address: size for key, size in stats.bytes_by_source.items()},
        seconds=end - begin,
        prepare_s=prepared - begin,
        read_s=end - prepared - stats.confirm_s,
        unpack_s=stats.unpack_s,
        digest_s=stats.digest_s,
        wait_s=stats.wait_s,
        confirm_s=stats.confirm_s,
        reads=tuple(
            SourceRead(
                address=offers[key].address,
                source_rank=offers[key].rank,
                rank=rank,
                transport=offers[key].transport,
                num_bytes=size,
                seconds=stats.seconds_by_source[key],
            )
            for key, size in stats.bytes_by_source.items()
        ),
    )
