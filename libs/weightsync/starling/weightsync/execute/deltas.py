"""What a source can send instead of whole boxes: what changed in them since a version that the destination holds.

A publisher compares each snapshot with the one before, piece by piece, while the snapshot is already being read; it
keeps the result for some versions and cuts from it whatever boxes are asked for (`History`). A relay passes on what it
was sent itself (`Forwarded`). Bases are named by their version alone: that what comes out is right, the digest proves.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from starling.weightsync.delta.boxes import cut
from starling.weightsync.delta.chain import compose
from starling.weightsync.delta.codec import scan, write
from starling.weightsync.delta.metrics import Total, total_of
from starling.weightsync.delta.parse import Parsed, parse
from starling.weightsync.execute.memory import Array, Memory
from starling.weightsync.execute.once import Once
from starling.weightsync.layout import Box, Piece

MAX_SHARE: Final = 0.5
"""A delta that takes a larger share of its piece is not worth its work."""

Cut = tuple[int, Box, int]
"""Piece, box and base."""


class Deltas(Protocol):
    """Thread-safe."""

    def bases(self, snapshot: int) -> tuple[int, ...]:
        """Return the versions from which deltas may lead to a snapshot."""

    def ready(self, snapshot: int) -> bool:
        """Whether all is known that `of` needs."""

    def of(self, snapshot: int, index: int, box: Box, base: int) -> Memory | None:
        """Return the delta of a box of a piece against version `base`, or None where only the whole box will do."""

    def known(self, snapshot: int, index: int, box: Box, base: int) -> Memory | None:
        """Return what `of` has returned before."""


class NoDeltas:
    """Of a source that sends everything whole."""

    def bases(self, snapshot: int) -> tuple[int, ...]:
        """See `Deltas.bases`."""
        return ()

    def ready(self, snapshot: int) -> bool:
        """See `Deltas.ready`."""
        return True

    def of(self, snapshot: int, index: int, box: Box, base: int) -> Memory | None:
        """See `Deltas.of`."""
        return None

    def known(self, snapshot: int, index: int, box: Box, base: int) -> Memory | None:
        """See `Deltas.known`."""
        return None


@dataclass(frozen=True)
class Step:
    """What changed from one version to the next."""

    base: int
    version: int
    pieces: tuple[tuple[Memory, Parsed] | None, ...]
    """Of each piece; None where it must be sent whole."""
    total: Total

    @property
    def size_bytes(self) -> int:
        """Memory that it takes."""
        return sum(piece[0].nbytes for piece in self.pieces if piece is not None)


def compare(
    base: int, old: Sequence[Array], version: int, new: Sequence[Array], stopped: Callable[[], bool]
) -> Step | None:
    """Find what changed between two snapshots of the same pieces; None when `stopped` before the end.

    Args:
        base: version of `old`.
        old: the pieces, contiguous.
        version: of `new`.
        new: the same pieces.
        stopped: asked every few milliseconds.
    """
    pieces: list[tuple[Memory, Parsed] | None] = []
    metrics = []
    for before, after in zip(old, new, strict=True):
        if not after.size:
            pieces.append(None)
            continue
        scanned = scan(after, before, after.itemsize, max_share=MAX_SHARE, keep_values=True, stopped=stopped)
        if stopped():
            return None
        metrics.append(scanned.metrics)
        data = None if scanned.form == "dense" else write(scanned, after).data
        pieces.append(None if data is None else (data, parse(data)))
    return Step(base, version, tuple(pieces), total_of(metrics))


class History:
    """The steps between the last versions of one rank, oldest first; each begins where the one before ends."""

    def __init__(
        self, pieces: Sequence[Piece], num_versions: int, limit_bytes: int, stands: Callable[[int], bool]
    ) -> None:
        """Keep at most so many steps, and so many bytes, for the snapshots that `stands` says can still be read."""
        self._stands = stands
        self._pieces = tuple(pieces)
        self._num_versions, self._limit_bytes = num_versions, limit_bytes
        self._lock = threading.Lock()
        self._steps: deque[Step] = deque()
        self._versions: dict[int, int] = {}  # by snapshot
        self._awaited: tuple[int, int] | None = None  # base and version of the step that is being made
        self._cuts: dict[int, Once[Cut, Memory | None]] = {}

    def begin(self, snapshot: int, version: int, base: int) -> None:
        """Expect the step from `base` to `version`, which lies in `snapshot`; with a base of -1 there is none."""
        with self._lock:
            self._versions[snapshot] = version
            self._cuts[snapshot] = Once()
            for old in [old for old in self._versions if not self._stands(old)]:
                del self._versions[old], self._cuts[old]
            self._awaited = (base, version) if base >= 0 else None
            if base < 0:
                self._steps.clear()

    def end(self, step: Step | None) -> None:
        """Add the step that was expected; without it no delta leads over it, and none of the earlier ones is of use."""
        with self._lock:
            self._awaited = None
            if step is None:
                self._steps.clear()
                return
            self._steps.append(step)
            while self._steps and (
                len(self._steps) > self._num_versions
                or sum(kept.size_bytes for kept in self._steps) > self._limit_bytes
            ):
                self._steps.popleft()

    def bases(self, snapshot: int) -> tuple[int, ...]:
        """See `Deltas.bases`. The step that is being made counts: nobody knows yet that it is of no use."""
        with self._lock:
            version = self._versions.get(snapshot, -1)
            steps = [(step.base, step.version) for step in self._steps]
            if self._awaited is not None:
                steps.append(self._awaited)
            return tuple(base for base, to in steps if to <= version)

    def ready(self, snapshot: int) -> bool:
        """See `Deltas.ready`."""
        with self._lock:
            return self._awaited is None or self._versions.get(snapshot, -1) != self._awaited[1]

    def of(self, snapshot: int, index: int, box: Box, base: int) -> Memory | None:
        """See `Deltas.of`."""
        with self._lock:
            cuts, version = self._cuts.get(snapshot), self._versions.get(snapshot, -1)
            steps = [step for step in self._steps if base <= step.base and step.version <= version]
        if cuts is None or not steps or steps[0].base != base or steps[-1].version != version:
            return None
        return cuts.of((index, box, base), partial(self._cut, steps, index, box))

    def known(self, snapshot: int, index: int, box: Box, base: int) -> Memory | None:
        """See `Deltas.known`."""
        with self._lock:
            cuts = self._cuts.get(snapshot)
        return None if cuts is None else cuts.find((index, box, base))

    def _cut(self, steps: Sequence[Step], index: int, box: Box) -> Memory | None:
        piece = self._pieces[index]
        whole: Memory | None = None
        for step in steps:
            found = step.pieces[index]
            if found is None:
                return None
            data = found[0] if box == piece.box else cut(found[1], piece.box, box).data
            whole = data if whole is None else compose(whole, data).data
        size = Piece(names=piece.names, dtype=piece.dtype, box=box).size_bytes
        return whole if whole is not None and whole.nbytes < size else None


class Forwarded:
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
        """See `Deltas.bases`."""
        with self._lock:
            return self._bases if snapshot == self._snapshot else ()

    def ready(self, snapshot: int) -> bool:
        """See `Deltas.ready`: what has arrived has arrived with its delta."""
        return True

    def of(self, snapshot: int, index: int, box: Box, base: int) -> Memory | None:
        """See `Deltas.of`."""
        with self._lock:
            return self._data.get((index, box, base)) if snapshot == self._snapshot else None

    known = of
