"""The work of one pull: many buckets from many sources at once, each tried elsewhere when its source fails.

The thread that pulls drives the transports and decides; the threads of a pool unpack and digest. A bucket is asked for
when there is scratch for what must be unpacked, and when its source has fewer than `BUCKETS_PER_SOURCE` under way.
Where the destination still holds a version of the bucket against which the source may have deltas, it asks first how
large these are. A bucket of which a delta has led to another digest is asked for whole.
"""

from __future__ import annotations

import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, NamedTuple

import msgspec
import numpy as np

from starling.common.errors import WeightsError
from starling.weightsync.delta.boxes import apply_box
from starling.weightsync.memory.arrays import Array, Memory, flat_bytes, grouped, packed_arrays
from starling.weightsync.memory.digests import DigestMode, digest_of_array
from starling.weightsync.memory.pools import BufferPool
from starling.weightsync.plan.buckets import BUCKETS_PER_SOURCE, payload_bytes
from starling.weightsync.plan.layout import aligned
from starling.weightsync.plan.offer import DIGEST_BYTES
from starling.weightsync.puller.schedule import BucketRead, ReadSchedule, with_deltas
from starling.weightsync.transports.base import AnswerReceived, ConnectionLost, ReadTarget, SourceConnection
from starling.weightsync.transports.deadline import Deadline
from starling.weightsync.transports.messages import (
    MeasureDeltas,
    OpenSnapshot,
    ReadBoxes,
    ReleaseSnapshot,
    SourceAnswer,
)

TRIES: Final = 2
"""How often a source is asked for a bucket that arrives with another digest."""
PROGRESS_S: Final = 0.1
"""Progress is told this often."""


class PullProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a pull has come."""

    bytes_done: int
    bytes_total: int
    seconds_left: float
    """By the rate so far; infinite before anything has arrived."""


@dataclass
class FetchStats:
    """What a transfer took. Seconds of several threads may overlap."""

    num_retries: int = 0
    bytes_by_source: dict[str, int] = field(default_factory=dict)
    lanes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unpack_s: float = 0.0
    digest_s: float = 0.0
    confirm_s: float = 0.0
    num_deltas: int = 0
    """Boxes that arrived as deltas."""
    wait_s: float = 0.0
    """Of the pulling thread: nothing to do but wait for sources and threads."""


class ReceivedDelta(NamedTuple):
    """What stood for one box of a read."""

    box: int
    """Its index."""
    base: int
    data: Memory


@dataclass(frozen=True)
class FetchOptions:
    """How a transfer is done."""

    digests: DigestMode
    version: int
    """That is being pulled."""
    stall_s: float
    """How long a source may owe an answer before another one is tried, if there is one."""
    place: Callable[[BucketRead, int, Array], None]
    """Writes the box of that index from an array, where the destination is memory that numpy cannot reach."""
    arrived: Callable[[int, bytes, Sequence[ReceivedDelta]], None]
    """Told of each read that is done, by its index in the stage, with the digests of its boxes and what came as deltas;
    their memory is used again afterwards."""
    delta_bytes: int
    """Most memory for deltas on their way."""
    report: Callable[[PullProgress], None] | None = None


@dataclass
class _Ticket:
    """A bucket that was asked for."""

    index: int
    peer: SourceConnection
    travels: BucketRead
    """The bucket as it was asked for: perhaps with deltas."""
    sizes: tuple[int, ...]
    """For each box the bytes of its delta, or 0; empty without deltas."""
    base: int
    scratch: Memory
    landing: ReadTarget
    digests: bytes = b""

    def deltas(self) -> list[ReceivedDelta]:
        """Return what stood for boxes."""
        arrays = zip(self.sizes, self.landing.arrays, strict=True) if self.sizes else ()
        return [ReceivedDelta(index, self.base, array) for index, (size, array) in enumerate(arrays) if size]


@dataclass(frozen=True)
class _Comparison:
    """A bucket of which the deltas' sizes were asked for, and then what they are."""

    index: int
    peer: SourceConnection
    base: int
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Finished:
    """A bucket that was unpacked and digested."""

    ticket: _Ticket
    bad: int | None
    """Index of a box that is not what it should be."""
    error: BaseException | None
    unpack_s: float
    digest_s: float


@dataclass
class _Failures:
    """Who has failed at a bucket, and why."""

    tries: Counter[str] = field(default_factory=Counter)
    reasons: list[str] = field(default_factory=list)


class BucketFetcher:
    """Reads all of a stage.

    `peers` are, for each source rank, who can be asked, in order of preference; `numbers` takes so many numbers that
    no request has had, and returns the first. `bases` are, for each read of the stage, the version that its boxes hold,
    or -1 where they hold parts of several; it is kept true.
    """

    def __init__(
        self,
        stage: ReadSchedule,
        peers: Mapping[int, Sequence[SourceConnection]],
        scratch: BufferPool,
        pool: ThreadPoolExecutor,
        terms: FetchOptions,
        numbers: Callable[[int], int],
        bases: list[int],
    ) -> None:
        self._stage, self._peers, self._scratch, self._pool, self._terms = stage, peers, scratch, pool, terms
        self._by_key = {peer.key: peer for group in peers.values() for peer in group}
        self._wires = list({id(peer.wire): peer.wire for peer in self._by_key.values()}.values())
        self._waiting: dict[int, deque[int]] = {rank: deque() for rank in stage.source_ranks}
        for index, read in enumerate(stage.reads):
            self._waiting[read.source_rank].append(index)
        self._failures: dict[int, _Failures] = {}
        self._bases = bases
        self._comparing: dict[int, _Comparison] = {}
        self._compared: dict[int, _Comparison] = {}  # by bucket
        self._tickets: dict[int, _Ticket] = {}
        self._asked: dict[int, SourceConnection] = {}
        self._num_finishing = 0
        self._delta_bytes = 0
        self._finished: queue.SimpleQueue[_Finished] = queue.SimpleQueue()
        self._num_left = len(stage.reads)
        self._numbers = numbers
        self._bytes_done = 0
        self._begin = self._told = time.monotonic()
        self.work = FetchStats()

    def run(self, deadline: Deadline) -> None:
        """Read everything. On return, however it ends, nothing writes to the destination any more.

        Raises:
            WeightsError: the deadline, a cancellation, or a bucket that nobody could deliver.
        """
        try:
            self._tell(True)
            while self._num_left:
                self._launch()
                self._step(deadline, "receiving weights")
                self._tell()
            arrived = time.perf_counter()
            for peer in self._by_key.values():
                if peer.state == "open":
                    self._release(peer)
            while self._asked:
                self._step(deadline, "confirming that the snapshot stood still")
            self.work.confirm_s = time.perf_counter() - arrived
            self._tell(True)
        except BaseException:  # raised again, after nobody is left who could still write
            for peer in self._by_key.values():
                self._drop(peer)
            raise
        finally:
            while self._num_finishing:  # threads that still read scratch or write the destination
                self._settle(self._finished.get())

    # --- asking ---

    def _launch(self) -> None:
        for rank, waiting in self._waiting.items():
            while waiting:
                peer = self._peer_for(rank, waiting[0])
                if peer.state in ("new", "connected"):
                    self._open(peer)
                elif peer.state == "opening" or not self._may_ask(peer) or not self._ask(waiting[0], peer):
                    break
                else:
                    waiting.popleft()

    def _peer_for(self, rank: int, index: int) -> SourceConnection:
        """Return whom to ask for a bucket: the first who is alive and has not failed at it."""
        failed = self._failures.get(index, _Failures())
        for peer in self._peers[rank]:
            if peer.state != "dead" and failed.tries[peer.key] < TRIES:
                return peer
        reasons = failed.reasons or [peer.reason for peer in self._peers[rank]]
        raise WeightsError(" ".join(dict.fromkeys(reasons)))

    def _open(self, peer: SourceConnection) -> None:
        try:
            if peer.state == "new":
                peer.wire.connect(peer.key, peer.offer)
        except WeightsError as error:
            self._bury(peer, str(error))
            return
        peer.state = "opening"
        number = self._numbers(1)
        self._asked[number] = peer
        peer.ask(OpenSnapshot(number=number, snapshot=peer.offer.snapshot, token=peer.offer.token), ReadTarget())

    def _may_ask(self, peer: SourceConnection) -> bool:
        num_under_way = len(self._tickets) + len(self._comparing)
        return peer.in_flight < BUCKETS_PER_SOURCE and num_under_way < self._stage.plan.buckets_in_flight

    def _ask(self, index: int, peer: SourceConnection) -> bool:
        """Ask for a bucket if there is scratch for it, or for the sizes of its deltas."""
        read, base = self._stage.reads[index], self._bases[index]
        compared = self._compared.get(index)
        if self._may_compare(read, peer, base) and (compared is None or (compared.peer, compared.base) != (peer, base)):
            self._compare(index, peer)
            return True
        travels, sizes = read, tuple[int, ...]()
        if compared is not None and compared.peer is peer and compared.base == base and any(compared.sizes):
            travels, sizes = with_deltas(read, compared.sizes), compared.sizes
            if travels.scratch_bytes(scatters=False) > self._terms.delta_bytes:
                travels, sizes = read, ()
        scratch = self._room(travels.scratch_bytes(scatters=peer.wire.scatters), for_deltas=bool(sizes))
        if scratch is None:
            return False
        if any(travels.direct):
            self._bases[index] = -1
        number = self._numbers(len(travels.segments))
        landing = _landing(travels, scratch, scatters=peer.wire.scatters)
        self._tickets[number] = _Ticket(index, peer, travels, sizes, base, scratch, landing)
        request = ReadBoxes(
            number=number,
            tag=number,
            segments=travels.segments,
            boxes=read.boxes,
            digests=self._terms.digests,
            salt=self._terms.version,
            base=max(0, base),
            encoded=sizes,
        )
        peer.in_flight += 1
        peer.ask(request, landing)
        return True

    def _room(self, size_bytes: int, *, for_deltas: bool) -> Memory | None:
        """Return memory for what arrives, or None when there is none now. Deltas have some only while they need it."""
        if not for_deltas:
            return self._scratch.take(size_bytes)
        if self._delta_bytes + size_bytes > self._terms.delta_bytes:
            return None
        self._delta_bytes += size_bytes
        return np.empty(size_bytes, np.uint8)

    def _give(self, ticket: _Ticket) -> None:
        """Take the memory of a bucket back."""
        if ticket.sizes:
            self._delta_bytes -= ticket.scratch.nbytes
        else:
            self._scratch.give(ticket.scratch)

    def _may_compare(self, read: BucketRead, peer: SourceConnection, base: int) -> bool:
        """Whether deltas may do. Without full digests nobody would notice that they were of another base."""
        return (
            base >= 0
            and base in peer.bases
            and self._terms.digests == "full"
            and not peer.wire.scatters
            and all(array is not None for array in read.arrays)
        )

    def _compare(self, index: int, peer: SourceConnection) -> None:
        number = self._numbers(1)
        self._comparing[number] = _Comparison(index, peer, self._bases[index])
        peer.in_flight += 1
        peer.ask(
            MeasureDeltas(number=number, base=self._bases[index], boxes=self._stage.reads[index].boxes), ReadTarget()
        )

    def _release(self, peer: SourceConnection) -> None:
        self.work.lanes[peer.key] = peer.wire.lanes(peer.key)
        number = self._numbers(1)
        self._asked[number] = peer
        peer.ask(ReleaseSnapshot(number=number), ReadTarget())

    # --- what happens ---

    def _step(self, deadline: Deadline, doing: str) -> None:
        """Wait for something to happen, and act on it."""
        owing = [peer for peer in self._by_key.values() if peer.owes]
        at = f" ({', '.join(peer.offer.address for peer in owing[:3])} owe an answer)" if owing else ""
        wait_s = deadline.check(doing + at)
        if self._settle_all():
            wait_s = 0.0
        before = time.perf_counter()
        for wire in self._wires:
            for event in wire.poll(wait_s if len(self._wires) == 1 else min(wait_s, 0.002)):
                peer = self._by_key.get(event.source)
                if peer is not None:
                    self._act(peer, event)
        self.work.wait_s += time.perf_counter() - before
        self._settle_all()
        now = time.monotonic()
        for peer in owing:
            if peer.owes and now - peer.heard > self._terms.stall_s and self._has_stand_in(peer):
                self._bury(peer, f"{peer.offer.address} has not answered for {self._terms.stall_s:g} s")

    def _act(self, peer: SourceConnection, event: AnswerReceived | ConnectionLost) -> None:
        if isinstance(event, ConnectionLost):
            self._bury(peer, f"The connection to {peer.offer.address} broke: {event.reason}.")
            return
        answer = event.answer
        peer.answered()
        ticket = self._tickets.pop(answer.number, None)
        comparison = self._comparing.pop(answer.number, None)
        if ticket is not None:
            peer.in_flight -= 1
            self._finish(ticket, answer)
        elif comparison is not None:
            peer.in_flight -= 1
            self._learn(comparison, answer)
        elif self._asked.pop(answer.number, None) is None:
            self._bury(peer, f"{peer.offer.address} answered what was not asked")
        elif answer.reason:
            self._bury(peer, answer.reason)
            if not self._num_left:
                raise WeightsError(answer.reason)
        else:
            peer.state = "open" if peer.state == "opening" else "connected"
            peer.bases = answer.bases

    def _learn(self, comparison: _Comparison, answer: SourceAnswer) -> None:
        """Take note of how large deltas are."""
        index, peer = comparison.index, comparison.peer
        if answer.reason:
            self._again(index, peer, answer.reason)
            return
        boxes = self._stage.reads[index].boxes
        if len(answer.sizes) != len(boxes) or any(
            not 0 <= size < max(1, box.size_bytes) for size, box in zip(answer.sizes, boxes, strict=True)
        ):
            self._bury(peer, f"{peer.offer.address} named sizes of deltas that cannot be")
        else:
            self._compared[index] = replace(comparison, sizes=answer.sizes)
        self._waiting[self._stage.reads[index].source_rank].appendleft(index)

    def _finish(self, ticket: _Ticket, answer: SourceAnswer) -> None:
        if answer.reason:
            if ticket.sizes:  # perhaps the source has forgotten its deltas: then it has the boxes themselves
                self._bases[ticket.index] = -1
            self._fail(ticket, answer.reason, elsewhere=not ticket.sizes)
            return
        read = self._stage.reads[ticket.index]
        expected = 0 if self._terms.digests == "off" else len(read.boxes) * DIGEST_BYTES
        if len(answer.digests) != expected:
            self._bury(ticket.peer, f"{ticket.peer.offer.address} sent {len(answer.digests)} bytes of digests")
            self._fail(ticket, ticket.peer.reason)
            return
        ticket.digests = answer.digests
        self._bases[ticket.index] = -1
        job = self._pool.submit(_finish, read, ticket, self._terms)
        self._num_finishing += 1  # unless the process is ending, and no thread takes anything up any more
        job.add_done_callback(partial(self._hand_over, ticket))

    def _hand_over(self, ticket: _Ticket, job: Future[_Finished]) -> None:
        """Runs in the thread that has finished."""
        error = job.exception()
        self._finished.put(job.result() if error is None else _Finished(ticket, None, error, 0.0, 0.0))
        ticket.peer.wire.wake()

    def _settle_all(self) -> bool:
        some = False
        while not self._finished.empty():
            self._settle(self._finished.get())
            some = True
        return some

    def _settle(self, done: _Finished) -> None:
        self._num_finishing -= 1
        ticket, read = done.ticket, self._stage.reads[done.ticket.index]
        self.work.unpack_s += done.unpack_s
        self.work.digest_s += done.digest_s
        if done.error is not None:
            self._give(ticket)
            raise done.error
        if done.bad is not None:
            box = read.boxes[done.bad]
            key = ticket.peer.offer.address
            self._fail(
                ticket, f"Box {box.box} of {box.names[0]} arrived from {key} with another digest.", elsewhere=False
            )
            return
        self._bases[ticket.index] = self._terms.version
        deltas = ticket.deltas()
        self._terms.arrived(ticket.index, ticket.digests, deltas)
        self._give(ticket)
        self._num_left -= 1
        self._bytes_done += read.size_bytes
        self.work.num_deltas += len(deltas)
        by_source = self.work.bytes_by_source
        by_source[ticket.peer.key] = by_source.get(ticket.peer.key, 0) + ticket.travels.size_bytes

    # --- failures ---

    def _fail(self, ticket: _Ticket, reason: str, *, elsewhere: bool = True) -> None:
        """Take the room of a bucket back, and ask for it again."""
        self._give(ticket)
        self._again(ticket.index, ticket.peer, reason, elsewhere=elsewhere)

    def _again(self, index: int, peer: SourceConnection, reason: str, *, elsewhere: bool = True) -> None:
        """Put a bucket back to the front of its queue."""
        self.work.num_retries += 1
        failed = self._failures.setdefault(index, _Failures())
        failed.reasons.append(reason)
        failed.tries[peer.key] += TRIES if elsewhere else 1
        self._waiting[self._stage.reads[index].source_rank].appendleft(index)

    def _bury(self, peer: SourceConnection, reason: str) -> None:
        """Have no more to do with a source; what it owes is asked of others."""
        peer.reason = reason
        self._drop(peer)
        for number, ticket in sorted(self._tickets.items(), reverse=True):
            if ticket.peer is peer:
                del self._tickets[number]
                self._fail(ticket, reason)
        for number, comparison in sorted(self._comparing.items(), reverse=True):
            if comparison.peer is peer:
                del self._comparing[number]
                self._again(comparison.index, peer, reason)
        for number in [number for number, asked in self._asked.items() if asked is peer]:
            del self._asked[number]
            if not self._num_left:
                raise WeightsError(reason)

    def _drop(self, peer: SourceConnection) -> None:
        peer.wire.drop(peer.key)
        peer.state, peer.in_flight, peer.owes = "dead", 0, 0

    def _has_stand_in(self, peer: SourceConnection) -> bool:
        groups = [group for group in self._peers.values() if peer in group]
        return all(any(other is not peer and other.state != "dead" for other in group) for group in groups)

    # --- telling ---

    def _tell(self, now: bool = False) -> None:
        if self._terms.report is None or not (now or time.monotonic() - self._told >= PROGRESS_S):
            return
        self._told = time.monotonic()
        total, done = self._stage.total_bytes, self._bytes_done
        left = (total - done) * (self._told - self._begin) / done if done else float("inf") if total else 0.0
        self._terms.report(PullProgress(bytes_done=done, bytes_total=total, seconds_left=left))


def _landing(read: BucketRead, scratch: Memory, *, scatters: bool) -> ReadTarget:
    """Say where the payload of a read goes: where it belongs, or into scratch."""
    arrays: list[Array] = []
    buffers: list[Memory] = []
    begin = 0
    for group, direct in zip(grouped(range(len(read.boxes)), read.segments), read.direct, strict=True):
        targets = [read.arrays[index] for index in group]
        if direct and targets[0] is not None:
            arrays.append(targets[0])
            buffers.append(flat_bytes(targets[0]))
            continue
        boxes = [read.boxes[index] for index in group if not scatters or read.arrays[index] is None]
        size = payload_bytes([box.size_bytes for box in boxes])
        buffers.append(scratch[begin : begin + size])
        begin += aligned(size)
        blocks = iter(packed_arrays(boxes, buffers[-1]))
        arrays += [next(blocks) if target is None or not scatters else target for target in targets]
    return ReadTarget(tuple(arrays), tuple(buffers))


def _finish(read: BucketRead, ticket: _Ticket, terms: FetchOptions) -> _Finished:
    """Digest the boxes that have arrived, and bring them to where they belong. Runs in a thread."""
    begin = time.perf_counter()
    unpack_s = 0.0
    proven = ticket.peer.wire.scatters or terms.digests == "off"
    sizes = ticket.sizes or (0,) * len(read.boxes)
    for index, (block, target, size) in enumerate(zip(ticket.landing.arrays, read.arrays, sizes, strict=True)):
        before = time.perf_counter()
        if size:
            assert target is not None
            try:
                apply_box(block, target)
            except WeightsError:  # bits changed on the way: nothing was written
                return _Finished(ticket, index, None, unpack_s, before - begin - unpack_s)
            block = target
            unpack_s += time.perf_counter() - before
        if not proven:
            digest = digest_of_array(block, terms.digests, terms.version)
            if digest != ticket.digests[index * DIGEST_BYTES :][:DIGEST_BYTES]:
                return _Finished(ticket, index, None, unpack_s, time.perf_counter() - begin - unpack_s)
        before = time.perf_counter()
        if target is None:
            terms.place(read, index, block)
        elif target is not block:
            np.copyto(target, block)
        unpack_s += time.perf_counter() - before
    return _Finished(ticket, None, None, unpack_s, time.perf_counter() - begin - unpack_s)
