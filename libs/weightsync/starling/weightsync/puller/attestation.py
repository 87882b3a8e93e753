"""What live tensors hold of a version: the digests of every box that the plan brought, and the root of them."""

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
    """Digests of what a destination holds, collected shard by shard.

    Args:
        stage: how the version was pulled.
        pieces: the destination's shards.
        digests: which bytes count.
        offer: the version.
    """

    def __init__(self, stage: ReadSchedule, pieces: Sequence[ShardPiece], digests: DigestMode, offer: Offer) -> None:
        self._stage, self._pieces, self._digests, self._offer = stage, pieces, digests, offer
        self._held: list[list[bytes]] = [[b""] * len(read.boxes) for read in stage.reads]

    def take_bucket(self, index: int, live: Sequence[torch.Tensor]) -> None:
        """Digest the boxes of one bucket in `live`, which has a tensor for every shard. Any thread may."""
        read = self._stage.reads[index]
        for position, shard in enumerate(read.shards):
            self._take(index, position, shard, live[shard])

    def take_shards(self, live: Mapping[int, torch.Tensor]) -> None:
        """Digest all boxes of some shards."""
        for index, read in enumerate(self._stage.reads):
            for position, shard in enumerate(read.shards):
                if shard in live:
                    self._take(index, position, shard, live[shard])

    def root(self, sent: Mapping[int, bytes]) -> str:
        """Return the root of what is held; `sent` are the digests of each bucket's boxes, as its source sent them."""
        held_root, sent_root = _Root(), _Root()
        for index, read in enumerate(self._stage.reads):
            held_root.add(read, self._held[index])
            sent_root.add(read, cut_digests(sent[index], len(read.boxes)))
        return attested_root(self._offer, root_of(sent_root.proofs), root_of(held_root.proofs))

    def _take(self, index: int, position: int, shard: int, tensor: torch.Tensor) -> None:
        box, outer, array = self._stage.reads[index].boxes[position], self._pieces[shard].box, array_of(tensor)
        if array is None:
            array = array_of(tensor_part(tensor, outer, box.box).contiguous().cpu())
            assert array is not None
            outer = box.box
        part = part_of(array, outer, box.box)
        self._held[index][position] = digest_of_array(part, self._digests, self._offer.version)


class _Root:
    """What a root is computed of."""

    def __init__(self) -> None:
        self.proofs: list[tuple[str, Box, bytes]] = []

    def add(self, read: BucketRead, digests: Sequence[bytes]) -> None:
        self.proofs += [(box.names[0], box.box, digest) for box, digest in zip(read.boxes, digests, strict=True)]


def cut_digests(digests: bytes, num: int) -> list[bytes]:
    """Return the digests of `num` boxes; empty ones where there are none."""
    return [digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES] for index in range(num)]
