"""Bucket fetcher of one pull: many buckets from many sources at once, each retried elsewhere when its source fails.

The pulling thread drives the transports and decides; the threads of a pool unpack and digest. A bucket is requested
when the buffer pool has memory for what must be unpacked, and when its source has fewer than `BUCKETS_PER_SOURCE` in
flight. Where the destination still holds a version of the bucket against which the source may have deltas, it first
requests their sizes. A bucket whose digest differs after a delta was applied is requested again as a whole.
"""

from __future__ import annotations

import heapq
import queue
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from starling.common.errors import WeightsError
from starling.weightsync.delta.boxes import apply_box
from starling.weightsync.memory.arrays import Array, Memory, flat_bytes, grouped, packed_arrays
from starling.weightsync.memory.digests import DigestMode, digest_of_array
from starling.weightsync.memory.jobs import done_at_once, is_small
from starling.weightsync.memory.pools import BufferPool
from starling.weightsync.offers.offer import DIGEST_BYTES
from starling.weightsync.offers.tickets import prove
from starling.weightsync.plan.buckets import BUCKETS_PER_SOURCE, payload_bytes
from starling.weightsync.plan.layout import aligned
from starling.weightsync.puller.deadline import Deadline
from starling.weightsync.puller.report import PullProgress
from starling.weightsync.puller.schedule import BucketRead, ReadSchedule, with_deltas, with_tensors
from starling.weightsync.puller.sources import SourceConnection
from starling.weightsync.tensors.views import flat_tensor, is_direct_tensor
from starling.weightsync.transports.base import AnswerReceived, ConnectionLost, ReadTarget
from starling.weightsync.transports.messages import (
    MeasureDeltas,
    OpenSnapshot,
    ReadBoxes,
    ReleaseSnapshot,
    SourceAnswer,
)

MAX_ATTEMPTS: Final = 2
MAX_REASON_CHARACTERS: Final = 1000
"""Of what a source says of a failure; those of all sources of a box go on together."""
"""How often a source is asked for a bucket that arrives with a wrong digest."""
NONCE_BYTES: Final = 16
"""Randomness in the proof of a ticket."""
_ON_DEVICE: Final = np.empty(0, np.uint8)
"""In place of the array of a box that goes to a device."""
PROGRESS_INTERVAL_S: Final = 0.1
"""Minimum time between two progress reports."""


@dataclass
class FetchStats:
    """Counts and times of a fetch. Seconds of several threads may overlap."""

    num_retries: int = 0
    bytes_by_source: dict[str, int] = field(default_factory=dict)
    seconds_by_source: dict[str, float] = field(default_factory=dict)
    """From the beginning to the last box that arrived from a source."""
    lanes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unpack_s: float = 0.0
    digest_s: float = 0.0
    confirm_s: float = 0.0
    num_deltas: int = 0
    """Boxes that arrived as deltas."""
    wait_s: float = 0.0
    """Time that the pulling thread only waited for sources and threads."""


class ReceivedDelta(NamedTuple):
    """The delta that arrived for one box of a read."""

    box: int
    """Index of the box."""
    base: int
    data: Memory


@dataclass(frozen=True)
class FetchOptions:
    """Parameters and callbacks of a fetch."""

    digests: DigestMode
    version: int
    """The version being pulled."""
    rank: int
    """The destination's rank."""
    stall_s: float
    """How long a source may owe an answer before a fallback source is tried, if there is one."""
    place: Callable[[BucketRead, int, Array], None]
    """Writes the box of that index from an array, where numpy cannot reach the destination's memory."""
    tensor: Callable[[BucketRead, int], torch.Tensor]
    """Returns the part of a live tensor that such a box fills."""
    arrived: Callable[[int, bytes, Sequence[ReceivedDelta]], None]
    """Called with each read that is complete, by its index in the schedule, with the digests of its boxes and the
    deltas among them, whose memory is reused afterwards."""
    requested_whole: Callable[[int], None]
    """Called with each read that is requested without deltas, by its index in the schedule."""
    delta_bytes: int
    """Maximum memory for deltas in flight."""
    report: Callable[[PullProgress], None] | None = None


@dataclass
class _RequestedBucket:
    """A bucket in flight, and then being unpacked."""

    index: int
    source: SourceConnection
    travels: BucketRead
    """The bucket as it was requested: perhaps with deltas."""
    sizes: tuple[int, ...]
    """For each box the bytes of its delta, or 0; empty without deltas."""
    base: int
    buffer: Memory
    target: ReadTarget
    digests: bytes = b""
    placed: bool = False
    """Whether boxes on a device are there already."""

    def deltas(self) -> list[ReceivedDelta]:
        """Return the deltas among the boxes."""
        arrays = zip(self.sizes, self.target.arrays, strict=True) if self.sizes else ()
        return [ReceivedDelta(index, self.base, array) for index, (size, array) in enumerate(arrays) if size]


@dataclass(frozen=True)
class _DeltaSizes:
    """The delta sizes of a bucket at one source: requested, then known."""

    index: int
    source: SourceConnection
    base: int
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class _UnpackedBucket:
    """The result of unpacking and digesting a bucket."""

    bucket: _RequestedBucket
    bad: int | None
    """Index of a box whose digest or delta is wrong."""
    error: BaseException | None
    unpack_s: float
    digest_s: float


@dataclass
class _Failures:
    """The sources that have failed to deliver a bucket, and why."""

    attempts: Counter[str] = field(default_factory=Counter)
    reasons: list[str] = field(default_factory=list)


class BucketFetcher:
    """Reads all buckets of a schedule.

    Args:
        schedule: the buckets.
        sources: for each source rank the connections that can serve it, in order of preference.
        buffers: memory for what must be unpacked.
        pool: threads that unpack and digest.
        options: how it is done.
        numbers: reserves this many request numbers, and returns the first.
        bases: for each read of the schedule the version that its boxes hold, or -1 where they hold parts of several;
            kept up to date.
    """

    def __init__(
        self,
        schedule: ReadSchedule,
        sources: Mapping[int, Sequence[SourceConnection]],
        buffers: BufferPool,
        pool: ThreadPoolExecutor,
        options: FetchOptions,
        numbers: Callable[[int], int],
        bases: list[int],
    ) -> None:
        self._schedule, self._sources, self._buffers = schedule, sources, buffers
        self._pool, self._options = pool, options
        self._by_key = {source.key: source for group in sources.values() for source in group}
        self._clients = list({id(source.client): source.client for source in self._by_key.values()}.values())
        self._waiting: dict[int, list[int]] = {rank: [] for rank in schedule.source_ranks}
        """By source rank, as a heap: a relay and its readers then request the same bucket next."""
        for index, read in enumerate(schedule.reads):
            self._waiting[read.source_rank].append(index)  # the indices grow: it is a heap
        self._failures: dict[int, _Failures] = {}
        self._bases = bases
        self._measuring: dict[int, _DeltaSizes] = {}  # by request number
        self._measured: dict[int, _DeltaSizes] = {}  # by bucket
        self._requested: dict[int, _RequestedBucket] = {}  # by request number
        self._control: dict[int, SourceConnection] = {}  # by number: sources asked to open or release a snapshot
        self._any_placed = False
        """Whether a source has placed boxes on a device."""
        self._num_unpacking = 0
        self._delta_bytes = 0
        self._unpacked: queue.SimpleQueue[_UnpackedBucket] = queue.SimpleQueue()
        self._num_left = len(schedule.reads)
        self._numbers = numbers
        self._bytes_done = 0
        self._begin = self._reported_at = time.monotonic()
        self.stats = FetchStats()

    def run(self, deadline: Deadline) -> None:
        """Read everything. After it returns or raises, nothing writes to the destination.

        Raises:
            WeightsError: the deadline, a cancellation, or a bucket that no source could deliver.
        """
        try:
            self._report(force=True)
            while self._num_left:
                self._launch()
                self._wait(deadline, "receiving weights")
                self._report()
            arrived = time.perf_counter()
            for source in self._by_key.values():
                if source.state == "open":
                    self._release_snapshot(source)
            while self._control:
                self._wait(deadline, "confirming that the snapshot stood still")
            self.stats.confirm_s = time.perf_counter() - arrived
            self._report(force=True)
        except BaseException:  # whatever it is: end everything that could still write, and re-raise
            self._abandon()
            raise

    # --- requests ---

    def _launch(self) -> None:
        for rank, waiting in self._waiting.items():
            while waiting:
                source = self._choose_source(rank, waiting[0])
                if source.state in ("new", "connected"):
                    self._open(source)
                elif source.state == "opening" or not self._may_ask(source) or not self._ask(waiting[0], source):
                    break
                else:
                    heapq.heappop(waiting)

    def _choose_source(self, rank: int, index: int) -> SourceConnection:
        """Return the source to ask for a bucket: the first that is alive and has not failed to deliver it."""
        failures = self._failures.get(index, _Failures())
        for source in self._sources[rank]:
            if source.state != "dead" and failures.attempts[source.key] < MAX_ATTEMPTS:
                return source
        reasons = failures.reasons or [source.reason for source in self._sources[rank]]
        raise WeightsError(" ".join(dict.fromkeys(reasons)))

    def _open(self, source: SourceConnection) -> None:
        try:
            if source.state == "new":
                source.client.connect(source.key, source.offer)
        except WeightsError as error:
            self._mark_dead(source, str(error))
            return
        source.state = "opening"
        number = self._numbers(1)
        self._control[number] = source
        offer = source.offer
        nonce = secrets.token_hex(NONCE_BYTES)
        proof = prove(offer, rank=self._options.rank, nonce=nonce)
        source.ask(OpenSnapshot(number=number, snapshot=offer.snapshot, proof=proof.text), ReadTarget(), proof)

    def _may_ask(self, source: SourceConnection) -> bool:
        num_in_flight = len(self._requested) + len(self._measuring)
        return source.in_flight < BUCKETS_PER_SOURCE and num_in_flight < self._schedule.plan.buckets_in_flight

    def _ask(self, index: int, source: SourceConnection) -> bool:
        """Request a bucket, or the sizes of its deltas. Return False when there is no buffer for it now."""
        read, base = self._schedule.reads[index], self._bases[index]
        measured = self._measured.get(index)
        if self._may_have_deltas(read, source, base) and (
            measured is None or (measured.source, measured.base) != (source, base)
        ):
            self._measure_deltas(index, source)
            return True
        travels, sizes = read, tuple[int, ...]()
        if measured is not None and measured.source is source and measured.base == base and any(measured.sizes):
            travels, sizes = with_deltas(read, measured.sizes), measured.sizes
            if travels.buffer_bytes(scatters=False) > self._options.delta_bytes:
                travels, sizes = read, ()
        tensors = self._tensors(read, source)
        if tensors and not source.client.scatters:
            travels = with_tensors(read, [tensor is not None for tensor in tensors])
        buffer = self._acquire(travels.buffer_bytes(scatters=source.client.scatters), for_deltas=bool(sizes))
        if buffer is None:
            return False
        if any(travels.direct):
            self._bases[index] = -1
        number = self._numbers(len(travels.segments))
        target = _read_target(travels, buffer, tensors, scatters=source.client.scatters)
        self._requested[number] = _RequestedBucket(index, source, travels, sizes, base, buffer, target)
        request = ReadBoxes(
            number=number,
            tag=number,
            segments=travels.segments,
            boxes=read.boxes,
            digests=self._options.digests,
            salt=self._options.version,
            base=max(0, base),
            encoded=sizes,
        )
        source.in_flight += 1
        source.ask(request, target)
        if not sizes:
            self._options.requested_whole(index)
        return True

    def _tensors(self, read: BucketRead, source: SourceConnection) -> tuple[torch.Tensor | None, ...]:
        """Return for each box the part of a tensor on a device that its source fills, None for others; or nothing.

        A transport that scatters may fill all of them, others contiguous ones of some size.
        """
        if all(array is not None for array in read.arrays):
            return ()
        parts = [
            self._options.tensor(read, index) if array is None else None for index, array in enumerate(read.arrays)
        ]
        if source.client.scatters:
            return tuple(parts)
        tensors = [part if part is not None and is_direct_tensor(part) else None for part in parts]
        kinds = {tensor.device.type for tensor in tensors if tensor is not None}
        return tuple(tensors) if kinds and all(map(source.client.receives, kinds)) else ()

    def _acquire(self, size_bytes: int, *, for_deltas: bool) -> Memory | None:
        """Return memory for a payload, or None when there is none now. Memory for deltas is allocated, not pooled."""
        if not for_deltas:
            return self._buffers.acquire(size_bytes)
        if self._delta_bytes + size_bytes > self._options.delta_bytes:
            return None
        self._delta_bytes += size_bytes
        return np.empty(size_bytes, np.uint8)

    def _free(self, bucket: _RequestedBucket) -> None:
        """Release the memory of a bucket."""
        if bucket.sizes:
            self._delta_bytes -= bucket.buffer.nbytes
        else:
            self._buffers.release(bucket.buffer)

    def _may_have_deltas(self, read: BucketRead, source: SourceConnection, base: int) -> bool:
        """Return whether deltas are possible. Only full digests would reveal a delta against another base."""
        return (
            base >= 0
            and base in source.bases
            and self._options.digests == "full"
            and not source.client.scatters
            and all(array is not None for array in read.arrays)
        )

    def _measure_deltas(self, index: int, source: SourceConnection) -> None:
        number, base = self._numbers(1), self._bases[index]
        self._measuring[number] = _DeltaSizes(index, source, base)
        source.in_flight += 1
        source.ask(MeasureDeltas(number=number, base=base, boxes=self._schedule.reads[index].boxes), ReadTarget())

    def _release_snapshot(self, source: SourceConnection) -> None:
        self.stats.lanes[source.key] = source.client.lanes(source.key)
        number = self._numbers(1)
        self._control[number] = source
        source.ask(ReleaseSnapshot(number=number), ReadTarget())

    # --- events ---

    def _wait(self, deadline: Deadline, doing: str) -> None:
        """Wait for events, and handle them."""
        owing = [source for source in self._by_key.values() if source.num_outstanding]
        at = f" ({', '.join(source.offer.address for source in owing[:3])} owe an answer)" if owing else ""
        wait_s = deadline.check(doing + at)
        if self._settle_all():
            wait_s = 0.0
        for client in self._clients:
            before = time.perf_counter()
            events = client.poll(wait_s if len(self._clients) == 1 else min(wait_s, 0.002))
            self.stats.wait_s += time.perf_counter() - before
            for event in events:
                source = self._by_key.get(event.source)
                if source is not None:
                    self._handle(source, event)
        self._settle_all()
        for source in owing:
            stalled_s = source.stalled_s(self._options.stall_s)
            if stalled_s and self._has_fallback(source):
                self._mark_dead(source, f"{source.offer.address} has not answered for {stalled_s:.1f} s")

    def _handle(self, source: SourceConnection, event: AnswerReceived | ConnectionLost) -> None:
        if isinstance(event, ConnectionLost):
            self._mark_dead(source, f"The connection to {source.offer.address} broke: {event.reason}.")
            return
        answer = event.answer
        if answer.waiting:
            source.last_sign_at = time.monotonic()
            return
        source.answered()
        bucket = self._requested.pop(answer.number, None)
        measuring = self._measuring.pop(answer.number, None)
        if bucket is not None:
            source.in_flight -= 1
            bucket.placed = event.placed
            self._any_placed |= event.placed
            self._unpack(bucket, answer)
        elif measuring is not None:
            source.in_flight -= 1
            self._set_delta_sizes(measuring, answer)
        elif self._control.pop(answer.number, None) is None:
            self._mark_dead(source, f"{source.offer.address} answered a request that was not sent")
        elif answer.reason:
            self._mark_dead(source, answer.reason)
            self._check_confirmed(answer.reason)
        else:
            source.state = "open" if source.state == "opening" else "connected"
            source.bases = answer.bases

    def _set_delta_sizes(self, measuring: _DeltaSizes, answer: SourceAnswer) -> None:
        index, source = measuring.index, measuring.source
        if answer.reason:
            self._retry(index, source, answer.reason)
            return
        boxes = self._schedule.reads[index].boxes
        if len(answer.sizes) != len(boxes) or any(
            not 0 <= size < max(1, box.size_bytes) for size, box in zip(answer.sizes, boxes, strict=True)
        ):
            self._mark_dead(source, f"{source.offer.address} answered with impossible sizes of deltas")
        else:
            self._measured[index] = replace(measuring, sizes=answer.sizes)
        heapq.heappush(self._waiting[self._schedule.reads[index].source_rank], index)

    def _unpack(self, bucket: _RequestedBucket, answer: SourceAnswer) -> None:
        source = bucket.source
        if answer.reason:
            if bucket.sizes:  # perhaps the source has dropped its deltas: it still has the boxes themselves
                self._bases[bucket.index] = -1
            self._fail(bucket, answer.reason, elsewhere=not bucket.sizes)
            return
        read = self._schedule.reads[bucket.index]
        expected = 0 if self._options.digests == "off" else len(read.boxes) * DIGEST_BYTES
        if len(answer.digests) != expected:
            self._mark_dead(source, f"{source.offer.address} sent {len(answer.digests)} bytes of digests")
            self._fail(bucket, source.reason)
            return
        bucket.digests = answer.digests
        self._bases[bucket.index] = -1
        work = partial(_unpack, read, bucket, self._options)
        at_once = not bucket.sizes and is_small(len(read.boxes), read.size_bytes)
        job = done_at_once(work) if at_once else self._pool.submit(work)
        self._num_unpacking += 1  # after `submit`, which fails while the process ends
        job.add_done_callback(partial(self._hand_over, bucket))

    def _hand_over(self, bucket: _RequestedBucket, job: Future[_UnpackedBucket]) -> None:
        """Pass the result to the pulling thread; runs in the thread that has unpacked it, which may be that one."""
        error = job.exception()
        self._unpacked.put(job.result() if error is None else _UnpackedBucket(bucket, None, error, 0.0, 0.0))
        bucket.source.client.wake()

    def _settle_all(self) -> bool:
        any_settled = False
        while not self._unpacked.empty():
            self._settle(self._unpacked.get())
            any_settled = True
        return any_settled

    def _settle(self, done: _UnpackedBucket) -> None:
        self._num_unpacking -= 1
        bucket, read = done.bucket, self._schedule.reads[done.bucket.index]
        self.stats.unpack_s += done.unpack_s
        self.stats.digest_s += done.digest_s
        if done.error is not None:
            self._free(bucket)
            raise done.error
        if done.bad is not None:
            box = read.boxes[done.bad]
            address = bucket.source.offer.address
            self._fail(
                bucket, f"Box {box.box} of {box.names[0]} arrived from {address} with another digest.", elsewhere=False
            )
            return
        self._bases[bucket.index] = self._options.version
        deltas = bucket.deltas()
        self._options.arrived(bucket.index, bucket.digests, deltas)
        self._free(bucket)
        self._num_left -= 1
        self._bytes_done += read.size_bytes
        self.stats.num_deltas += len(deltas)
        by_source = self.stats.bytes_by_source
        by_source[bucket.source.key] = by_source.get(bucket.source.key, 0) + bucket.travels.size_bytes
        self.stats.seconds_by_source[bucket.source.key] = time.monotonic() - self._begin

    # --- failures ---

    def _fail(self, bucket: _RequestedBucket, reason: str, *, elsewhere: bool = True) -> None:
        """Release the memory of a bucket, and request it again."""
        self._free(bucket)
        self._retry(bucket.index, bucket.source, reason, elsewhere=elsewhere)

    def _retry(self, index: int, source: SourceConnection, reason: str, *, elsewhere: bool = True) -> None:
        """Put a bucket back into its queue."""
        self.stats.num_retries += 1
        failures = self._failures.setdefault(index, _Failures())
        failures.reasons.append(reason[:MAX_REASON_CHARACTERS])
        failures.attempts[source.key] += MAX_ATTEMPTS if elsewhere else 1
        heapq.heappush(self._waiting[self._schedule.reads[index].source_rank], index)

    def _mark_dead(self, source: SourceConnection, reason: str) -> None:
        """Drop a source, and request its outstanding buckets from others."""
        source.reason = reason[:MAX_REASON_CHARACTERS]
        self._drop(source)
        for number, bucket in sorted(self._requested.items(), reverse=True):
            if bucket.source is source:
                del self._requested[number]
                self._fail(bucket, reason)
        for number, measuring in sorted(self._measuring.items(), reverse=True):
            if measuring.source is source:
                del self._measuring[number]
                self._retry(measuring.index, source, reason)
        for number in [number for number, asked in self._control.items() if asked is source]:
            del self._control[number]
            self._check_confirmed(reason)

    def _check_confirmed(self, reason: str) -> None:
        """Raise WeightsError if all has arrived, and a source does not confirm that its snapshot stood still.

        Full digests prove each bucket: the snapshot stood still when they were computed. But they are not compared
        with what was placed on a device.
        """
        if not self._num_left and (self._options.digests != "full" or self._any_placed):
            raise WeightsError(reason)

    def _abandon(self) -> None:
        """Drop every source and wait for each thread that still reads buffers or writes the destination.

        A source that cannot be dropped, or a thread that fails, too, does not end the wait for the others.
        """
        for source in self._by_key.values():
            source.client.hang_up(source.key)
        with ExitStack() as stack:  # calls the last one first, and each of them though others raise
            stack.callback(self._join_threads)
            for source in self._by_key.values():
                stack.callback(self._drop, source)

    def _join_threads(self) -> None:
        while self._num_unpacking:
            self._unpacked.get()
            self._num_unpacking -= 1

    def _drop(self, source: SourceConnection) -> None:
        source.client.drop(source.key)
        source.state, source.in_flight, source.num_outstanding = "dead", 0, 0

    def _has_fallback(self, source: SourceConnection) -> bool:
        groups = [group for group in self._sources.values() if source in group]
        return all(any(other is not source and other.state != "dead" for other in group) for group in groups)

    # --- progress ---

    def _report(self, *, force: bool = False) -> None:
        if self._options.report is None:
            return
        if not force and time.monotonic() - self._reported_at < PROGRESS_INTERVAL_S:
            return
        self._reported_at = time.monotonic()
        total, done = self._schedule.total_bytes, self._bytes_done
        left = (total - done) * (self._reported_at - self._begin) / done if done else float("inf") if total else 0.0
        self._options.report(PullProgress(bytes_done=done, bytes_total=total, seconds_left=left))


def _read_target(
    read: BucketRead, buffer: Memory, tensors: tuple[torch.Tensor | None, ...], *, scatters: bool
) -> ReadTarget:
    """Return where the payload of a read goes: in place, or into `buffer`."""
    arrays: list[Array] = []
    buffers: list[Any] = []
    begin = 0
    for group, direct in zip(grouped(range(len(read.boxes)), read.segments), read.direct, strict=True):
        targets = [read.arrays[index] for index in group]
        if direct and targets[0] is not None:
            arrays.append(targets[0])
            buffers.append(flat_bytes(targets[0]))
            continue
        tensor = tensors[group[0]] if direct and tensors else None
        if tensor is not None:
            arrays.append(_ON_DEVICE)
            buffers.append(flat_tensor(tensor))
            continue
        boxes = [read.boxes[index] for index in group if not scatters or read.arrays[index] is None]
        size = payload_bytes([box.size_bytes for box in boxes])
        buffers.append(buffer[begin : begin + size])
        begin += aligned(size)
        blocks = iter(packed_arrays(boxes, buffers[-1]))
        arrays += [next(blocks) if target is None or not scatters else target for target in targets]
    return ReadTarget(tuple(arrays), tuple(buffers), tensors)


def _unpack(read: BucketRead, bucket: _RequestedBucket, options: FetchOptions) -> _UnpackedBucket:
    """Digest the boxes that have arrived, and copy them to their destination; runs in a thread of the pool."""
    begin = time.perf_counter()
    unpack_s = 0.0
    verified = bucket.source.client.scatters or options.digests == "off"
    sizes = bucket.sizes or (0,) * len(read.boxes)
    tensors = bucket.target.tensors if bucket.placed else ()
    there = [tensor is not None for tensor in tensors] or [False] * len(read.boxes)
    for index, (block, target, size) in enumerate(zip(bucket.target.arrays, read.arrays, sizes, strict=True)):
        if there[index]:
            continue
        before = time.perf_counter()
        if size:
            assert target is not None
            try:
                apply_box(block, target)
            except WeightsError:  # the delta was corrupted on the way: nothing was written
                return _UnpackedBucket(bucket, index, None, unpack_s, before - begin - unpack_s)
            block = target
            unpack_s += time.perf_counter() - before
        if not verified:
            digest = digest_of_array(block, options.digests, options.version)
            if digest != bucket.digests[index * DIGEST_BYTES :][:DIGEST_BYTES]:
                return _UnpackedBucket(bucket, index, None, unpack_s, time.perf_counter() - begin - unpack_s)
        before = time.perf_counter()
        if target is None:
            options.place(read, index, block)
        elif target is not block:
            np.copyto(target, block)
        unpack_s += time.perf_counter() - before
    return _UnpackedBucket(bucket, None, None, unpack_s, time.perf_counter() - begin - unpack_s)
