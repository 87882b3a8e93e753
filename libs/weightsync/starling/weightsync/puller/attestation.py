"""Attestation: the root of the digests of what live tensors hold of a version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from starling.weightsync.memory.arrays import part_of
from starling.weightsync.memory.digests import DigestMode, digest_of_array
from starling.weightsync.plan.layout import Box, ShardPiece
from starling.weightsync.plan.offer import DIGEST_BYTES, Offer, attested_root, root_of
from starling.weightsync.puller.schedule import BucketRead, ReadSchedule
from starling.weightsync.tensors.views import array_of, tensor_part


class Attestation:
    """Digests of the boxes that a destination holds, collected shard by shard.

    Args:
        schedule: how the version was pulled.
        pieces: the destination's shards.
        digests: which bytes are digested.
        offer: the version.
    """

    def __init__(self, schedule: ReadSchedule, pieces: Sequence[ShardPiece], digests: DigestMode, offer: Offer) -> None:
        self._schedule, self._pieces, self._digests, self._offer = schedule, pieces, digests, offer
        self._digests_held: list[list[bytes]] = [[b""] * len(read.boxes) for read in schedule.reads]

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

    def root(self, sent: Mapping[int, bytes]) -> str:
        """Return the root of the collected digests; `sent` are those of each bucket's boxes as its source sent them."""
        held_root, sent_root = _Root(), _Root()
        for index, read in enumerate(self._schedule.reads):
            held_root.add(read, self._digests_held[index])
            sent_root.add(read, split_digests(sent[index], len(read.boxes)))
        return attested_root(self._offer, root_of(sent_root.proofs), root_of(held_root.proofs))

    def _add(self, index: int, position: int, shard: int, tensor: torch.Tensor) -> None:
        box, outer, array = self._schedule.reads[index].boxes[position], self._pieces[shard].box, array_of(tensor)
        if array is None:
            array = array_of(tensor_part(tensor, outer, box.box).contiguous().cpu())
            assert array is not None
            outer = box.box
        part = part_of(array, outer, box.box)
        self._digests_held[index][position] = digest_of_array(part, self._digests, self._offer.version)


class _Root:
    """The digests that a root is computed from."""

    def __init__(self) -> None:
        self.proofs: list[tuple[str, Box, bytes]] = []

    def add(self, read: BucketRead, digests: Sequence[bytes]) -> None:
        self.proofs += [(box.names[0], box.box, digest) for box, digest in zip(read.boxes, digests, strict=True)]


def split_digests(digests: bytes, num: int) -> list[bytes]:
    """Split concatenated digests of `num` boxes; empty ones where there are none."""
    return [digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES] for index in range(num)]
