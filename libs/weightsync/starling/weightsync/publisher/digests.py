"""Digests of a publisher's snapshots, and the roots over them, by which destinations prove what they hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from starling.common.errors import WeightsError
from starling.weightsync.memory.arrays import Array, part_of
from starling.weightsync.memory.digests import DigestMode, digest_of_array
from starling.weightsync.offers.offer import LayoutPart, digest_of, root_of
from starling.weightsync.plan.boxes import contains
from starling.weightsync.plan.layout import Box, ShardPiece
from starling.weightsync.plan.planner import Plan
from starling.weightsync.transports.source import SnapshotSource


class SnapshotDigests:
    """Computes the roots of one rank's snapshots, in the digesting thread. Readers get the same digests from `source`.

    Args:
        source: the snapshots.
        pieces: what each of them holds.
        rank: which rank of its layout this process is.
        num_ranks: of the layout.
        mode: which bytes are digested.
    """

    def __init__(
        self, source: SnapshotSource, pieces: Sequence[ShardPiece], rank: int, num_ranks: int, mode: DigestMode
    ) -> None:
        self._source, self._pieces, self._mode = source, tuple(pieces), mode
        self._rank, self._num_ranks = rank, num_ranks

    def root(self, version: int, snapshot: int, arrays: Sequence[Array]) -> str:
        """Return the root of all pieces of a snapshot; digests of every byte are stored in the arena too.

        Args:
            version: the version in the snapshot.
            snapshot: its number.
            arrays: its pieces.
        """
        if self._mode == "off":
            return digest_of(b"%d" % version)
        digests = [
            self._digest(version, snapshot, piece, piece.box, array)
            for piece, array in zip(self._pieces, arrays, strict=True)
        ]
        if self._mode == "full":
            self._source.arena.set_digests(snapshot, digests)
        return root_of((piece.names[0], piece.box, digest) for piece, digest in zip(self._pieces, digests, strict=True))

    def layout_part(
        self, plan: Plan, version: int, snapshot: int, arrays: Sequence[Array], stopped: Callable[[], bool]
    ) -> LayoutPart:
        """Return this rank's part of the layout root of the destination of `plan`.

        Args:
            plan: from all ranks to a destination, which has chosen its boxes.
            version: the version in the snapshot.
            snapshot: its number.
            arrays: its pieces.
            stopped: checked before each box.

        Raises:
            WeightsError: the plan is not one from the ranks of this layout, or `stopped` before the end.
        """

        def digest(shard: int, box: Box) -> bytes:
            if stopped():
                raise WeightsError(f"The layout root of {plan.destination} took too long.")
            if not 0 <= shard < len(self._pieces) or not contains(self._pieces[shard].box, box):
                raise WeightsError(f"The plan to {plan.destination} reads {box} of shard {shard}, which is not here.")
            piece = self._pieces[shard]
            return self._digest(version, snapshot, piece, box, part_of(arrays[shard], piece.box, box))

        parts = []
        for rank in plan.ranks:
            buckets = plan.of_destination(rank)
            wrong = next((one.source_rank for one in buckets if not 0 <= one.source_rank < self._num_ranks), None)
            if wrong is not None:
                raise WeightsError(f"The plan to {plan.destination} reads from rank {wrong}, which there is not.")
            transfers = [t for bucket in buckets if bucket.source_rank == self._rank for t in bucket.transfers]
            parts.append(tuple((t.destination_shard, t.box, digest(t.source_shard, t.box)) for t in transfers))
        return tuple(parts)

    def _digest(self, version: int, snapshot: int, piece: ShardPiece, box: Box, array: Array) -> bytes:
        """Return the digest of a box of a piece, whose elements are `array`; empty without digests."""
        if self._mode == "off":
            return b""
        salt = version if self._mode == "sampled" else 0
        key = (piece.names[0], box, self._mode, salt)
        return self._source.cache(snapshot).get_or_compute(key, partial(digest_of_array, array, self._mode, salt))
