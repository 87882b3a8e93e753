"""The offer: what a publisher says of one version, and how the version is proven.

A digest is xxh3-128 (hex) over the bytes of one piece, row-major and contiguous, little-endian. The root of a version
is xxh3-128 over its pieces' sorted names, boxes and digests: equal roots mean equal bits. It guards against mistakes,
not against an adversary; who may read is the token's affair.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
import xxhash

from starling.common.errors import WeightsError
from starling.weightsync.layout import ITEM_BYTES, Piece, decode
from starling.weightsync.plan import Plan

Transport = Literal["ucx", "local"]


class RankOffer(msgspec.Struct, frozen=True, kw_only=True):
    """How to read the snapshot of one source rank, and what is in it."""

    rank: int
    transport: Transport
    address: str
    """``host:port`` of the rank's listener (ucx), or the path of its arena (local)."""
    token: str
    """Whoever presents it may read this snapshot."""
    snapshot: int
    pieces: tuple[Piece, ...]
    """In the order of the rank's shards; in the snapshot they lie at `packed_offsets` of their sizes."""
    digests: tuple[str, ...]
    """One for each piece."""


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """One version of the weights, ready to be read."""

    version: int
    ranks: tuple[RankOffer, ...]
    root: str
    """`root_of` all pieces of all ranks."""


def decode_offer(data: bytes | bytearray | memoryview) -> Offer:
    """Read an offer and check that it is consistent.

    Raises:
        WeightsError: `data` is not an offer, or its root does not follow from its digests.
    """
    offer = decode(Offer, data)
    check_offer(offer)
    return offer


def check_offer(offer: Offer) -> None:
    """Check that ranks are unique, every piece has a digest, and the root follows from them.

    Raises:
        WeightsError: naming the version.
    """
    if len({rank.rank for rank in offer.ranks}) != len(offer.ranks):
        raise WeightsError(f"The offer of version {offer.version} lists a rank twice.")
    for piece in (piece for rank in offer.ranks for piece in rank.pieces):
        if not piece.names or piece.dtype not in ITEM_BYTES or min((*piece.box.offset, *piece.box.size), default=0) < 0:
            raise WeightsError(f"The offer of version {offer.version} has the malformed piece {piece}.")
    if any(len(rank.pieces) != len(rank.digests) for rank in offer.ranks):
        raise WeightsError(f"The offer of version {offer.version} has pieces without digests.")
    if root_of(_proofs(offer)) != offer.root:
        raise WeightsError(f"The root {offer.root} of version {offer.version} does not follow from its digests.")


def digest_of(data: bytes | memoryview) -> str:
    """Return the digest of contiguous bytes."""
    return xxhash.xxh3_128_hexdigest(data)


def root_of(proofs: Iterable[tuple[Piece, str]]) -> str:
    """Return the root of pieces and their digests. Copies of a piece count once, empty pieces not at all.

    Raises:
        WeightsError: two copies of a piece differ.
    """
    digests: dict[tuple[str, tuple[int, ...], tuple[int, ...]], str] = {}
    for piece, digest in proofs:
        if not piece.box.volume:
            continue
        key = (piece.names[0], piece.box.offset, piece.box.size)
        if digests.setdefault(key, digest) != digest:
            raise WeightsError(f"Two copies of box {piece.box} of tensor {piece.names[0]} differ.")
    state = xxhash.xxh3_128()
    for key in sorted(digests):
        state.update(msgspec.msgpack.encode((key, digests[key])))
    return state.hexdigest()


def make_offer(version: int, ranks: Sequence[RankOffer]) -> Offer:
    """Put the ranks of one replica together.

    Raises:
        WeightsError: two ranks hold different bits of what should be one piece.
    """
    ordered = tuple(sorted(ranks, key=lambda rank: rank.rank))
    offer = Offer(version=version, ranks=ordered, root="")
    return msgspec.structs.replace(offer, root=root_of(_proofs(offer)))


def expected_root(offer: Offer, plan: Plan, destination_rank: int = 0) -> str:
    """Return the root that destination rank `destination_rank` attests when it holds what `plan` brings it.

    It is `offer.root` when the plan brings every piece of the version.
    """
    ranks = {rank.rank: rank for rank in offer.ranks}
    taken = {
        (bucket.source_rank, transfer.source_shard)
        for bucket in plan.of_destination(destination_rank)
        for transfer in bucket.transfers
    }
    return root_of((ranks[rank].pieces[shard], ranks[rank].digests[shard]) for rank, shard in taken)


def _proofs(offer: Offer) -> Iterable[tuple[Piece, str]]:
    for rank in offer.ranks:
        yield from zip(rank.pieces, rank.digests, strict=True)
