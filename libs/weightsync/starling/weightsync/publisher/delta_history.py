"""What a source can send instead of whole boxes: what changed in them since a version that the destination holds.

A publisher compares each snapshot with the one before, part by part, while the snapshot is already being read: what has
been found travels and is applied while the rest is still compared. It keeps the result for some versions and cuts from
it whatever boxes are asked for (`DeltaHistory`). A relay passes on what it
was sent itself (`ForwardedDeltas`). Bases are named by their version alone: that what comes out is right, the digest
proves.
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
from typing import Final, Protocol

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
"""A delta that takes a larger share of its piece is not worth its work."""
MIN_PART_BYTES: Final = 256 << 10
"""The parts in which a piece is compared are no smaller, on average: calls would take longer than the work."""
NUM_THREADS: Final = 2
"""That compare at one time: training needs the other cores."""
MAX_PARTS: Final = 4096
"""Most of them that a piece is compared in."""
TELL_S: Final = 0.002
"""Readers who wait for deltas are told no more often that there are more."""

Cut = tuple[int, Box, int]
"""Piece, box and base."""


class DeltaSource(Protocol):
    """Thread-safe."""

    def bases(self, snapshot: int) -> tuple[int, ...]:
        """Return the versions from which deltas may lead to a snapshot."""

    def ready(self, snapshot: int, boxes: Sequence[tuple[int, Box]]) -> bool:
        """Whether all is known that `of` needs for these boxes of pieces."""

    def of(self, snapshot: int, index: int, box: Box, base: int) -> Memory | None:
        """Return the delta of a box of a piece against version `base`, or None where only the whole box will do."""

    def known(self, snapshot: int, index: int, box: Box, base: int) -> Memory | None:
        """Return what `of` has returned before."""


class NoDeltas:
    """Of a source that sends everything whole."""

    def bases(self, snapshot: int) -> tuple[int, ...]:
        """See `DeltaSource.bases`."""
        return ()

    def ready(self, snapshot: int, boxes: Sequence[tuple[int, Box]]) -> bool:
        """See `DeltaSource.ready`."""
        return True

    def of(self, snapshot: int, index: int, box: Box, base: int) -> Memory | None:
        """See `DeltaSource.of`."""
        return None

    def known(self, snapshot: int, index: int, box: Box, base: int) -> Memory | None:
        """See `DeltaSource.known`."""
        return None


@dataclass(frozen=True)
class DeltaPart:
    """What changed in some rows of a piece."""

    box: Box
    data: Memory | None
    """The delta; None where they must be sent whole."""
    parsed: Parsed | None


class DeltaStep:
    """What changed from one version to the next, as far as it has been found.

    Args:
        base: version before.
        version: version after.
        boxes: in which each piece is compared, in this order.
    """

    def __init__(self, base: int, version: int, boxes: Sequence[Sequence[Box]]) -> None:
        self.base, self.version, self.boxes = base, version, boxes
        self.size_bytes = 0
        """Memory that it takes."""
        self._parts: list[list[DeltaPart]] = [[] for _ in boxes]
        self._begins: list[list[int]] = [[] for _ in boxes]
        """The first row of each part."""

    def add(self, index: int, part: DeltaPart) -> None:
        """Add the next part of a piece."""
        self._parts[index].append(part)
        self._begins[index].append(part.box.offset[0] if part.box.offset else 0)
        self.size_bytes += 0 if part.data is None else part.data.nbytes

    def part(self, index: int, box: Box) -> DeltaPart | None:
        """Return the part of a piece that holds `box`; None when there is none, or not yet."""
        at = bisect_right(self._begins[index], box.offset[0] if box.offset else 0) - 1
        part = self._parts[index][at] if at >= 0 else None
        return part if part is not None and contains(part.box, box) else None

    def knows(self, index: int, box: Box) -> bool:
        """Whether all is there that is to be known of `box`."""
        return len(self._parts[index]) == len(self.boxes[index]) or self.part(index, box) is not None


def parts_of(piece: ShardPiece, wished: Iterable[Box]) -> tuple[Box, ...]:
    """Return the boxes in which a piece is compared: those that are wished, where these are runs of whole rows that do
    not overlap, and what lies between them; else all of it.

    Who asks for such a box again gets a delta that needs not be cut, before the rest of the piece has been compared.
    """
    whole = piece.box
    if not whole.volume:
        return ()
    boxes: list[Box] = []
    end = begin = whole.offset[0] if whole.offset else 0

    def rows(first: int, num: int) -> Box:
        return Box(offset=(first, *whole.offset[1:]), size=(num, *whole.size[1:]))

    for box in sorted(wished, key=lambda box: box.offset):
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
    """Find what changed in some rows of a piece; None when `stopped` before the end.

    Args:
        old: the piece before, contiguous.
        new: the piece now.
        piece: what both are.
        box: the rows.
        stopped: asked every few milliseconds.
    """
    before, after = part_of(old, piece.box, box), part_of(new, piece.box, box)
    scanned = scan(after, before, after.itemsize, max_share=MAX_SHARE, keep_values=True, stopped=stopped)
    if stopped():
        return None
    data = None if scanned.form == "dense" else write(scanned, after).data
    return DeltaPart(box, data, None if data is None else parse(data)), scanned.metrics


class DeltaHistory:
    """The steps between the last versions of one rank, oldest first; each begins where the one before ends."""

    def __init__(
        self, pieces: Sequence[ShardPiece], num_versions: int, limit_bytes: int, stands: Callable[[int], bool]
    ) -> None:
        """Keep at most so many steps, and so many bytes, for the snapshots that `stands` says can still be read."""
        self._stands = stands
        self._pieces = tuple(pieces)
        self._num_versions, self._limit_bytes = num_versions, limit_bytes
        self._lock = threading.Lock()
        self._steps: deque[DeltaStep] = deque()
        self._making: DeltaStep | None = None
        self._versions: dict[int, int] = {}  # by snapshot
        self._cuts: dict[int, SingleFlight[Cut, Memory | None]] = {}
        self._boxes = [parts_of(piece, ()) for piece in pieces]  # in which they are compared
        self._wished: dict[int, set[Box]] = {}  # by piece, since the last step was begun

    def begin(self, snapshot: int, version: int, base: int) -> None:
        """Expect the step from `base` to `version`, which lies in `snapshot`; with a base of -1 there is none."""
        with self._lock:
            self._versions[snapshot] = version
            self._cuts[snapshot] = SingleFlight()
            for old in [old for old in self._versions if not self._stands(old)]:
                del self._versions[old], self._cuts[old]
            for index, wished in self._wished.items():
                self._boxes[index] = parts_of(self._pieces[index], wished)
            self._wished = {}
            self._making = DeltaStep(base, version, tuple(self._boxes)) if base >= 0 else None
            while self._steps and (base < 0 or len(self._steps) >= self._num_versions):
                self._steps.popleft()

    def compare(
        self, old: Sequence[Array], new: Sequence[Array], stopped: Callable[[], bool], tell: Callable[[], None]
    ) -> DeltaTotal | None:
        """Make the step that is expected, from the pieces before and now; None when `stopped` before the end.

        What has been found is there for readers at once. `tell` is called every few milliseconds, when there is more.
        """
        step, metrics, complete = self._making, list[DeltaMetrics](), False
        assert step is not None
        told = time.monotonic()
        jobs = [(index, box) for index, boxes in enumerate(step.boxes) for box in boxes]

        def work(job: tuple[int, Box]) -> tuple[DeltaPart, DeltaMetrics] | None:
            index, box = job
            return None if stopped() else compare(old[index], new[index], self._pieces[index], box, stopped)

        try:
            with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="weightsync-compare") as pool:
                for (index, _), found in zip(jobs, pool.map(work, jobs), strict=True):
                    if found is None:
                        return None
                    metrics.append(found[1])
                    with self._lock:
                        step.add(index, found[0])
                    if time.monotonic() - told > TELL_S:
                        tell()
                        told = time.monotonic()
            complete = True
        finally:
            self.end(step if complete else None)
        return total_of(metrics)

    def end(self, step: DeltaStep | None) -> None:
        """Add the step that was expected; without it no delta leads over it, and none of the earlier ones is of use."""
        with self._lock:
            self._making = None
            if step is None:
                self._steps.clear()
                return
            self._steps.append(step)
            while self._steps and sum(kept.size_bytes for kept in self._steps) > self._limit_bytes:
                self._steps.popleft()

    def bases(self, snapshot: int) -> tuple[int, ...]:
        """See `DeltaSource.bases`. The step that is being made counts: nobody knows yet that it is of no use."""
        with self._lock:
            version = self._versions.get(snapshot, -1)
            return tuple(step.base for step in self._known_steps() if step.version <= version)

    def ready(self, snapshot: int, boxes: Sequence[tuple[int, Box]]) -> bool:
        """See `DeltaSource.ready`."""
        with self._lock:
            step = self._making
            if step is None or self._versions.get(snapshot, -1) != step.version:
                return True
            return all(step.knows(index, box) for index, box in boxes)

    def of(self, snapshot: int, index: int, box: Box, base: int) -> Memory | None:
        """See `DeltaSource.of`."""
        with self._lock:
            cuts, version = self._cuts.get(snapshot), self._versions.get(snapshot, -1)
            wished = self._wished.setdefault(index, set())
            if len(wished) < MAX_PARTS:
                wished.add(box)
            steps = [step for step in self._known_steps() if base <= step.base and step.version <= version]
            found = [step.part(index, box) for step in steps]
        parts = [part for part in found if part is not None]
        if cuts is None or not steps or steps[0].base != base or steps[-1].version != version:
            return None
        if len(parts) < len(steps):  # a part of the box lies here, another there
            return None
        return cuts.of((index, box, base), partial(self._cut, parts, index, box))

    def known(self, snapshot: int, index: int, box: Box, base: int) -> Memory | None:
        """See `DeltaSource.known`."""
        with self._lock:
            cuts = self._cuts.get(snapshot)
        return None if cuts is None else cuts.find((index, box, base))

    def _known_steps(self) -> list[DeltaStep]:
        return [*self._steps, *([] if self._making is None else [self._making])]

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
    """What a relay was sent for the snapshot that it offers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._snapshot = 0
        self._bases: tuple[int, ...] = ()
        self._data: dict[Cut, Memory] = {}

    def begin(self, snapshot: int, bases: tuple[int, ...]) -> None:
        """Forget what was, and expect deltas against `bases`."""
        with self._lock:
            self._snapshot, self._bases, self._data = snapshot, bases, {}

    def put(self, index: int, box: Box, base: int, data: Memory) -> None:
        """Keep a copy of a delta."""
        with self._lock:
            self._data[index, box, base] = data.copy()

    def bases(self, snapshot: int) -> tuple[int, ...]:
        """See `DeltaSource.bases`."""
        with self._lock:
            return self._bases if snapshot == self._snapshot else ()

    def ready(self, snapshot: int, boxes: Sequence[tuple[int, Box]]) -> bool:
        """See `DeltaSource.ready`: what has arrived has arrived with its delta."""
        return True

    def of(self, snapshot: int, index: int, box: Box, base: int) -> Memory | None:
        """See `DeltaSource.of`."""
        with self._lock:
            return self._data.get((index, box, base)) if snapshot == self._snapshot else None

    known = of
