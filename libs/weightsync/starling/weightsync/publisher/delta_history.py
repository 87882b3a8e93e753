"""Deltas of a source: the changes in its pieces since versions that destinations still hold.

A publisher compares each snapshot with the previous one, part by part, while the snapshot is already being read: the
changes that were found travel and are applied while the rest is still compared. `DeltaHistory` keeps the result for
some versions and cuts from it the boxes that readers request. A relay forwards the deltas that it received itself
(`ForwardedDeltas`).
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final

from starling.weightsync.delta.boxes import cut
from starling.weightsync.delta.chain import compose
from starling.weightsync.delta.codec import scan, write
from starling.weightsync.delta.format import DeltaMetrics, DeltaTotal, total_of
from starling.weightsync.delta.parse import Parsed, parse
from starling.weightsync.memory.arrays import Array, Memory, part_of
from starling.weightsync.memory.single_flight import SingleFlight
from starling.weightsync.plan.boxes import contains
from starling.weightsync.plan.layout import Box, ShardPiece

MAX_SHARE: Final = 0.5
"""A delta that takes a larger share of its piece is not worth computing."""
MIN_PART_BYTES: Final = 256 << 10
"""Minimum average size of the parts in which a piece is compared: for smaller ones the calls would dominate."""
NUM_THREADS: Final = 2
"""Comparing threads: training needs the other cores."""
MAX_PARTS: Final = 4096
"""Maximum number of parts in which a piece is compared."""
NOTIFY_INTERVAL_S: Final = 0.002
"""Minimum time between two notifications of readers that wait for deltas."""

MIN_CUT_BYTES: Final = 64 << 20
"""Memory for the deltas that are cut for the boxes of readers, also where the deltas themselves may take less."""
ENTRY_BYTES: Final = 2 << 10
"""Memory of a cut besides its bytes."""

CutKey = tuple[int, Box, int]
"""Piece, box and base."""


class _NoRoomError(Exception):
    """The cuts of a snapshot take as much memory as they may."""


@dataclass(frozen=True)
class DeltaPart:
    """The changes in some rows of a piece."""

    box: Box
    data: Memory | None
    """The delta; None where the rows must be sent whole."""
    parsed: Parsed | None


class DeltaStep:
    """The changes from one version to the next, as far as they have been compared.

    Args:
        base: version before.
        version: version after.
        boxes: for each piece the boxes in which it is compared, in this order.
    """

    def __init__(self, base: int, version: int, boxes: Sequence[Sequence[Box]]) -> None:
        self.base, self.version, self.boxes = base, version, boxes
        self.size_bytes = 0
        """Memory of its deltas."""
        self._parts: list[list[DeltaPart]] = [[] for _ in boxes]
        self._begins: list[list[int]] = [[] for _ in boxes]
        """The first row of each part."""

    def add(self, index: int, part: DeltaPart) -> None:
        """Add the next part of a piece."""
        self._parts[index].append(part)
        self._begins[index].append(part.box.offset[0] if part.box.offset else 0)
        self.size_bytes += 0 if part.data is None else part.data.nbytes

    def part(self, index: int, box: Box) -> DeltaPart | None:
        """Return the part of a piece that contains `box`; None when there is none, or not yet."""
        at = bisect_right(self._begins[index], box.offset[0] if box.offset else 0) - 1
        part = self._parts[index][at] if at >= 0 else None
        return part if part is not None and contains(part.box, box) else None

    def is_compared(self, index: int, box: Box) -> bool:
        """Return whether the comparison has covered `box`."""
        return len(self._parts[index]) == len(self.boxes[index]) or self.part(index, box) is not None


def parts_of(piece: ShardPiece, requested: Iterable[Box]) -> tuple[Box, ...]:
    """Return the boxes in which a piece is compared: the requested ones and the gaps between them, where the requested
    boxes are runs of whole rows that do not overlap; else the whole piece.

    A reader that requests such a box again gets a delta that need not be cut, before the rest of the piece has been
    compared.
    """
    whole = piece.box
    if not whole.volume:
        return ()
    boxes: list[Box] = []
    end = begin = whole.offset[0] if whole.offset else 0

    def rows(first: int, num: int) -> Box:
        return Box(offset=(first, *whole.offset[1:]), size=(num, *whole.size[1:]))

    for box in sorted(requested, key=lambda box: box.offset):
        if not whole.offset or box.offset[0] < end or box != rows(box.offset[0], box.size[0]):
            return (whole,)
        if box.offset[0] > end:
            boxes.append(rows(end, box.offset[0] - end))
        boxes.append(box)
        end = box.offset[0] + box.size[0]
    if whole.offset and begin < end < begin + whole.size[0]:
        boxes.append(rows(end, begin + whole.size[0] - end))
    return tuple(boxes) if 1 < len(boxes) <= piece.size_bytes // MIN_PART_BYTES else (whole,)


def compare(
    old: Array, new: Array, piece: ShardPiece, box: Box, stopped: Callable[[], bool]
) -> tuple[DeltaPart, DeltaMetrics] | None:
    """Compute the changes in some rows of a piece; None when `stopped` before the end.

    Args:
        old: the piece before, contiguous.
        new: the piece now.
        piece: describes both.
        box: the rows.
        stopped: checked every few milliseconds.
    """
    before, after = part_of(old, piece.box, box), part_of(new, piece.box, box)
    scanned = scan(after, before, after.itemsize, max_share=MAX_SHARE, keep_values=True, stopped=stopped)
    if stopped():
        return None
    data = None if scanned.form == "dense" else write(scanned, after).data
    return DeltaPart(box, data, None if data is None else parse(data)), scanned.metrics


class DeltaHistory:
    """The `DeltaSource` of a publisher: the steps between its last versions, oldest first and without gaps.

    Args:
        pieces: what the rank publishes.
        num_versions: most steps that are kept.
        limit_bytes: most memory of their deltas, and of those that are cut for the boxes of one snapshot's readers.
        is_readable: returns whether a snapshot can still be read.
    """

    def __init__(
        self, pieces: Sequence[ShardPiece], num_versions: int, limit_bytes: int, is_readable: Callable[[int], bool]
    ) -> None:
        self._is_readable = is_readable
        self._pieces = tuple(pieces)
        self._num_versions, self._limit_bytes = num_versions, limit_bytes
        self._lock = threading.Lock()
        self._steps: deque[DeltaStep] = deque()
        self._running: DeltaStep | None = None
        self._versions: dict[int, int] = {}  # by snapshot
        self._cuts: dict[int, SingleFlight[CutKey, Memory | None]] = {}
        self._cut_bytes: dict[int, int] = {}  # by snapshot
        self._boxes = [parts_of(piece, ()) for piece in pieces]  # in which they are compared
        self._requested: dict[int, set[Box]] = {}  # by piece, since the last step was begun

    def begin(self, snapshot: int, version: int, base: int) -> None:
        """Announce the step from `base` to `version`, which lies in `snapshot`; there is none when `base` is -1."""
        with self._lock:
            self._versions[snapshot] = version
            self._cuts[snapshot], self._cut_bytes[snapshot] = SingleFlight(), 0
            for old in [old for old in self._versions if not self._is_readable(old)]:
                del self._versions[old], self._cuts[old], self._cut_bytes[old]
            for index, requested in self._requested.items():
                self._boxes[index] = parts_of(self._pieces[index], requested)
            self._requested = {}
            self._running = DeltaStep(base, version, tuple(self._boxes)) if base >= 0 else None
            while self._steps and (base < 0 or len(self._steps) >= self._num_versions):
                self._steps.popleft()

    def compare(
        self, old: Sequence[Array], new: Sequence[Array], stopped: Callable[[], bool], notify: Callable[[], None]
    ) -> DeltaTotal | None:
        """Compute the announced step from the pieces before and now; None when `stopped` before the end.

        Readers can get each part as soon as it is compared; `notify` is called every few milliseconds when there are
        more.
        """
        step, metrics, complete = self._running, list[DeltaMetrics](), False
        assert step is not None
        notified_at = time.monotonic()
        jobs = [(index, box) for index, boxes in enumerate(step.boxes) for box in boxes]

        def work(job: tuple[int, Box]) -> tuple[DeltaPart, DeltaMetrics] | None:
            index, box = job
            return None if stopped() else compare(old[index], new[index], self._pieces[index], box, stopped)

        try:
            with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="weightsync-compare") as pool:
                for (index, _), result in zip(jobs, pool.map(work, jobs), strict=True):
                    if result is None:
                        return None
                    metrics.append(result[1])
                    with self._lock:
                        step.add(index, result[0])
                    if time.monotonic() - notified_at > NOTIFY_INTERVAL_S:
                        notify()
                        notified_at = time.monotonic()
            complete = True
        finally:
            self.end(step if complete else None)
        return total_of(metrics)

    def end(self, step: DeltaStep | None) -> None:
        """Add the announced step. None drops all steps: there is a gap, which no chain of deltas can span."""
        with self._lock:
            self._running = None
            if step is None:
                self._steps.clear()
                return
            self._steps.append(step)
            while self._steps and sum(each.size_bytes for each in self._steps) > self._limit_bytes:
                self._steps.popleft()

    def bases(self, snapshot: int) -> tuple[int, ...]:
        """See `DeltaSource.bases`. Includes the base of the step that is being computed."""
        with self._lock:
            version = self._versions.get(snapshot, -1)
            return tuple(step.base for step in self._all_steps() if step.version <= version)

    def ready(self, snapshot: int, boxes: Sequence[tuple[int, Box]]) -> bool:
        """See `DeltaSource.ready`."""
        with self._lock:
            step = self._running
            if step is None or self._versions.get(snapshot, -1) != step.version:
                return True
            return all(step.is_compared(index, box) for index, box in boxes)

    def are_whole(self, snapshot: int, boxes: Sequence[tuple[int, Box]]) -> bool:
        """See `DeltaSource.are_whole`: here every box is in memory from the beginning."""
        return False

    def delta(self, snapshot: int, index: int, box: Box, base: int) -> Memory | None:
        """See `DeltaSource.delta`."""
        with self._lock:
            cuts, version = self._cuts.get(snapshot), self._versions.get(snapshot, -1)
            requested = self._requested.setdefault(index, set())
            if len(requested) < MAX_PARTS:
                requested.add(box)
            steps = [step for step in self._all_steps() if base <= step.base and step.version <= version]
            parts = [part for part in (step.part(index, box) for step in steps) if part is not None]
        if cuts is None or not steps or steps[0].base != base or steps[-1].version != version:
            return None
        if len(parts) < len(steps):  # in one of the steps, the box spans several parts
            return None
        try:
            return cuts.get_or_compute((index, box, base), partial(self._cut_within, snapshot, parts, index, box))
        except _NoRoomError:
            return None

    def cached_delta(self, snapshot: int, index: int, box: Box, base: int) -> Memory | None:
        """See `DeltaSource.cached_delta`."""
        with self._lock:
            cuts = self._cuts.get(snapshot)
        return None if cuts is None else cuts.get((index, box, base))

    def _all_steps(self) -> list[DeltaStep]:
        return [*self._steps, *([] if self._running is None else [self._running])]

    def _cut_within(self, snapshot: int, parts: Sequence[DeltaPart], index: int, box: Box) -> Memory | None:
        """Return `_cut`. Raises _NoRoomError when the cuts of the snapshot take as much memory as they may."""
        piece = self._pieces[index]
        most = ENTRY_BYTES + ShardPiece(names=piece.names, dtype=piece.dtype, box=box).size_bytes
        with self._lock:
            used = self._cut_bytes.get(snapshot, 0)
            if used + most > max(self._limit_bytes, MIN_CUT_BYTES):
                raise _NoRoomError
            if snapshot in self._cut_bytes:
                self._cut_bytes[snapshot] += most
        taken = 0
        try:
            data = self._cut(parts, index, box)
            is_new = data is not None and all(data is not part.data for part in parts)
            taken = ENTRY_BYTES + (data.nbytes if data is not None and is_new else 0)
        finally:
            with self._lock:
                if snapshot in self._cut_bytes:
                    self._cut_bytes[snapshot] -= most - taken
        return data

    def _cut(self, parts: Sequence[DeltaPart], index: int, box: Box) -> Memory | None:
        piece = self._pieces[index]
        whole: Memory | None = None
        for part in parts:
            if part.data is None or part.parsed is None:
                return None
            data = part.data if box == part.box else cut(part.parsed, part.box, box).data
            whole = data if whole is None else compose(whole, data).data
        size = ShardPiece(names=piece.names, dtype=piece.dtype, box=box).size_bytes
        return whole if whole is not None and whole.nbytes < size else None


class ForwardedDeltas:
    """The `DeltaSource` of a relay: the deltas that it received for the snapshot that it offers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._snapshot = 0
        self._bases: tuple[int, ...] = ()
        self._data: dict[CutKey, Memory] = {}
        self._whole: set[tuple[int, Box]] = set()
        """Boxes that were requested without deltas."""

    def begin(self, snapshot: int, bases: tuple[int, ...]) -> None:
        """Discard all deltas, and expect deltas of `snapshot` against `bases`."""
        with self._lock:
            self._snapshot, self._bases, self._data, self._whole = snapshot, bases, {}, set()

    def expect_whole(self, boxes: Iterable[tuple[int, Box]]) -> None:
        """Note that boxes will arrive without deltas."""
        with self._lock:
            self._whole.update(boxes)

    def put(self, index: int, box: Box, base: int, data: Memory) -> None:
        """Store a copy of a delta."""
        with self._lock:
            self._data[index, box, base] = data.copy()

    def bases(self, snapshot: int) -> tuple[int, ...]:
        """See `DeltaSource.bases`."""
        with self._lock:
            return self._bases if snapshot == self._snapshot else ()

    def ready(self, snapshot: int, boxes: Sequence[tuple[int, Box]]) -> bool:
        """See `DeltaSource.ready`: a box arrives together with its delta."""
        return True

    def are_whole(self, snapshot: int, boxes: Sequence[tuple[int, Box]]) -> bool:
        """See `DeltaSource.are_whole`."""
        with self._lock:
            return snapshot == self._snapshot and self._whole.issuperset(boxes)

    def delta(self, snapshot: int, index: int, box: Box, base: int) -> Memory | None:
        """See `DeltaSource.delta`."""
        with self._lock:
            return self._data.get((index, box, base)) if snapshot == self._snapshot else None

    cached_delta = delta
