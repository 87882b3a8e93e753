"""Attestation: the roots of the digests of what live tensors hold of a version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from starling.weightsync.memory.arrays import part_of
from starling.weightsync.memory.digests import DigestMode, digest_of_array
from starling.weightsync.offers.offer import DIGEST_BYTES, Offer, attested_root, rank_root, root_of
from starling.weightsync.plan.layout import Box, ShardPiece
from starling.weightsync.puller.schedule import BucketRead, ReadSchedule
from starling.weightsync.tensors.views import array_of, tensor_part


@dataclass(frozen=True)
class AttestedRoots:
    """The roots of what one rank holds of a version."""

    root: str
    """Equals the offer's root exactly when the rank holds what its sources sent."""
    rank_root: str
    """See `offer.rank_root`: a part of the layout root, which says what the rank holds, whatever its sources sent."""


class Attestation:
    """Digests of the boxes that a destination holds, collected shard by shard.

    Args:
        schedule: how the version was pulled.
        pieces: the destination's shards.
        digests: which bytes are digested.
        offer: the version.
        root_schedule: how it would be pulled from the publisher itself; its boxes are those of the layout root.
    """

    def __init__(
        self,
        schedule: ReadSchedule,
        pieces: Sequence[ShardPiece],
        digests: DigestMode,
        offer: Offer,
        root_schedule: ReadSchedule,
    ) -> None:
        self._schedule, self._pieces, self._digests, self._offer = schedule, pieces, digests, offer
        self._digests_held: list[list[bytes]] = [[b""] * len(read.boxes) for read in schedule.reads]
        self._boxes = _boxes_of(root_schedule)
        self._others: dict[int, list[Box]] = {}
        """By shard, the boxes of the layout root that were not read as they are."""
        for shard, box in set() if root_schedule is schedule else {*self._boxes} - {*_boxes_of(schedule)}:
            self._others.setdefault(shard, []).append(box)
        self._digests_of_others: dict[tuple[int, Box], bytes] = {}

    def add_bucket(self, index: int, live: Sequence[torch.Tensor]) -> None:
        """Digest the boxes of one bucket in `live`, which has a tensor for every shard. Thread-safe."""
        read = self._schedule.reads[index]
        for position, shard in enumerate(read.shards):
            self._add(index, position, shard, live[shard])

    def add_shards(self, live: Mapping[int, torch.Tensor]) -> None:
        """Digest all boxes of some shards."""
        for index, read in enumerate(self._schedule.reads):
            for position, shard in enumerate(read.shards):
                if shard in live:
                    self._add(index, position, shard, live[shard])
        for shard in self._others.keys() & live.keys():
            self.add_others(shard, live[shard])

    @property
    def shards_of_others(self) -> tuple[int, ...]:
        """The shards with boxes that no bucket has."""
        return tuple(self._others)

    def add_others(self, shard: int, tensor: torch.Tensor) -> None:
        """Digest the boxes of a shard, in `tensor`, that no bucket has. Thread-safe."""
        for box in self._others[shard]:
            self._digests_of_others[shard, box] = self._digest(shard, box, tensor)

    def roots(self, sent: Mapping[int, bytes]) -> AttestedRoots:
        """Return the roots of the collected digests.

        `sent` are the digests of each bucket's boxes as its source sent them.
        """
        held = dict(self._digests_of_others)
        for index, read in enumerate(self._schedule.reads):
            for shard, box, digest in zip(read.shards, read.boxes, self._digests_held[index], strict=True):
                held[shard, box.box] = digest
        of_rank = rank_root((shard, box, held[shard, box]) for shard, box in self._boxes)
        return AttestedRoots(self._root(sent), of_rank)

    def _root(self, sent: Mapping[int, bytes]) -> str:
        held_root, sent_root = _Root(), _Root()
        for index, read in enumerate(self._schedule.reads):
            held_root.add(read, self._digests_held[index])
            sent_root.add(read, split_digests(sent[index], len(read.boxes)))
        return attested_root(self._offer, root_of(sent_root.proofs), root_of(held_root.proofs))

    def _add(self, index: int, position: int, shard: int, tensor: torch.Tensor) -> None:
        box = self._schedule.reads[index].boxes[position].box
        self._digests_held[index][position] = self._digest(shard, box, tensor)

    def _digest(self, shard: int, box: Box, tensor: torch.Tensor) -> bytes:
        outer, array = self._pieces[shard].box, array_of(tensor)
        if array is None:
            array = array_of(tensor_part(tensor, outer, box).contiguous().cpu())
            assert array is not None
            outer = box
        return digest_of_array(part_of(array, outer, box), self._digests, self._offer.version)


class _Root:
    """The digests that a root is computed from."""

    def __init__(self) -> None:
        self.proofs: list[tuple[str, Box, bytes]] = []

    def add(self, read: BucketRead, digests: Sequence[bytes]) -> None:
        self.proofs += [(box.names[0], box.box, digest) for box, digest in zip(read.boxes, digests, strict=True)]


def _boxes_of(schedule: ReadSchedule) -> list[tuple[int, Box]]:
    """Return shard and box of each box that is read."""
    return [(shard, box.box) for read in schedule.reads for shard, box in zip(read.shards, read.boxes, strict=True)]


def split_digests(digests: bytes, num: int) -> list[bytes]:
    """Split concatenated digests of `num` boxes; empty ones where there are none."""
    return [digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES] for index in range(num)]
