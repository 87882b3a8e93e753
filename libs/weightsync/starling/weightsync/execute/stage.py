"""From a plan and an offer to what one destination rank does: buckets to read, and pieces to prove as they arrive."""

from __future__ import annotations

from dataclasses import dataclass

from starling.common.errors import WeightsError
from starling.weightsync.boxes import contains
from starling.weightsync.execute.regions import BucketRead, Region, region_pair
from starling.weightsync.layout import ITEM_BYTES, Layout, Piece, packed_offsets, pieces_of
from starling.weightsync.offer import Offer
from starling.weightsync.plan import Bucket, Plan, check_plan


@dataclass(frozen=True)
class Proof:
    """One piece of the source that must be found, bit for bit, inside one shard of the destination."""

    source_rank: int
    source_shard: int
    piece: Piece
    destination_shard: int
    region: Region
    """Where the piece lies in staging."""


@dataclass(frozen=True)
class Stage:
    """What one destination rank does for any version that has the same pieces."""

    plan: Plan
    pieces: dict[int, tuple[Piece, ...]]
    reads: tuple[BucketRead, ...]
    proofs: tuple[tuple[Proof, ...], ...]
    """For each read, what can be proven once it is done."""

    def fits(self, plan: Plan, offer: Offer) -> bool:
        """Whether this stage serves `offer` by `plan`."""
        return self.plan == plan and self.pieces == {rank.rank: rank.pieces for rank in offer.ranks}


def make_stage(plan: Plan, offer: Offer, layout: Layout, rank: int) -> Stage:
    """Work out the reads and proofs of destination rank `rank`.

    Raises:
        WeightsError: the plan does not bring what the layout needs from what the offer has, or it brings only a part
            of some piece to a shard, which cannot be proven: every source shard's box must lie inside the destination
            shard that takes it. Whole-tensor destinations always satisfy that.
    """
    pieces = {source.rank: source.pieces for source in offer.ranks}
    check_plan(plan, pieces, layout, rank)
    wanted = pieces_of(layout, rank)
    staging, _ = packed_offsets(piece.size_bytes for piece in wanted)
    snapshots = {source: packed_offsets(piece.size_bytes for piece in held)[0] for source, held in pieces.items()}
    last_read: dict[tuple[int, int, int], int] = {}
    reads: list[BucketRead] = []
    for index, bucket in enumerate(plan.of_destination(rank)):
        reads.append(_read(bucket, pieces[bucket.source_rank], snapshots[bucket.source_rank], wanted, staging))
        for transfer in bucket.transfers:
            last_read[bucket.source_rank, transfer.source_shard, transfer.destination_shard] = index
    proofs: list[list[Proof]] = [[] for _ in reads]
    for (source_rank, source_shard, shard), index in last_read.items():
        piece, outer = pieces[source_rank][source_shard], wanted[shard].box
        if not contains(outer, piece.box):
            raise WeightsError(
                f"Box {piece.box} of {piece.names[0]} cannot be proven by {layout.replica}, which holds {outer} of it: "
                "destination shards must contain the source shards that they take from."
            )
        size = ITEM_BYTES[piece.dtype]
        region, _ = region_pair(piece.box, (outer, staging[shard]), (piece.box, 0), size)
        proofs[index].append(Proof(source_rank, source_shard, piece, shard, region))
    return Stage(plan, pieces, tuple(reads), tuple(tuple(group) for group in proofs))


def _read(
    bucket: Bucket,
    held: tuple[Piece, ...],
    snapshot: tuple[int, ...],
    wanted: tuple[Piece, ...],
    staging: tuple[int, ...],
) -> BucketRead:
    pairs = [
        region_pair(
            transfer.box,
            (held[transfer.source_shard].box, snapshot[transfer.source_shard]),
            (wanted[transfer.destination_shard].box, staging[transfer.destination_shard]),
            ITEM_BYTES[held[transfer.source_shard].dtype],
        )
        for transfer in bucket.transfers
    ]
    return BucketRead(
        source_rank=bucket.source_rank,
        sources=tuple(source for source, _ in pairs),
        destinations=tuple(destination for _, destination in pairs),
    )
