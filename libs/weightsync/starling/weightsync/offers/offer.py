"""Offers: addresses from which one weight version can be read, and the digests that prove it.

A digest is xxh3-128 over the bytes of one box, row-major and contiguous, little-endian. The root of a rank is xxh3-128
over its pieces' names, boxes and digests; the root of a version is over the roots of its ranks: equal roots mean equal
bits.

The digests are not part of the offer, which every destination gets: there may be millions. A source sends the digests
of the requested boxes together with the boxes. A destination attests the version's root combined with two roots over
the boxes that it read, one from the sources' digests and one from digests of the weights that its engine holds
(`attested_root`): it equals the version's root exactly when these two are equal.

This says that the engine holds what the source sent. A source that is not trusted, such as a replica that passes a
version on, could send other bits with their digests. So there is a second root, the *layout root*, over the boxes of
the plan from the publisher's layout to the destination's: the publisher computes it from its snapshot, the destination
from what its engine holds, from wherever that came. Equal layout roots mean equal bits.

This guards against errors, not against an adversary; tickets control read access.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
import xxhash

from starling.common.errors import WeightsError
from starling.weightsync.plan.layout import Box, ShardPiece, decode

Transport = Literal["ucx", "tcp", "local", "nccl", "gloo", "nixl"]
TransportChoice = Literal["auto", "ucx", "tcp", "local", "nccl", "gloo", "nixl"]
"""As `transports.endpoints.choose_transport` reads it."""
DIGEST_BYTES: Final = 16
"""Size of the digest of a box."""
ROOT_CHARACTERS: Final = 2 * DIGEST_BYTES
LayoutPart: TypeAlias = tuple[tuple[tuple[int, Box, bytes], ...], ...]
"""For each rank of a destination: shard, box and digest of the boxes that one rank of the source sends."""
MAX_SECRET_CHARACTERS: Final = 64
"""Maximum length of a secret in an offer from a peer; a publisher draws 32 hexadecimal digits."""


class RankOffer(msgspec.Struct, frozen=True, kw_only=True):
    """Address and identity of the snapshot of one rank."""

    rank: int
    transport: Transport
    address: str
    """``host:port`` of the rank's listener, or the path of its arena (local)."""
    snapshot: Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]
    """Number of the snapshot in its arena."""
    holds: str
    """Digest of the names and boxes that the rank holds: ranks with equal ones can replace each other as sources."""
    root: str
    """Root of the rank's pieces."""
    secret: str = ""
    """Secret of this snapshot (`offers.tickets`), in the offer of a source to the controller; else empty."""
    ticket: str = ""
    """Ticket for one pull, in an offer to a reader; else empty."""
    encrypted: bool = False
    """Whether what follows the opening of the snapshot is encrypted; only `tcp` can."""


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """One weight version that is ready to be read."""

    version: int
    ranks: tuple[RankOffer, ...]
    root: str
    """Root of the version, derived from the roots of the ranks."""


def decode_offer(data: bytes | bytearray | memoryview) -> Offer:
    """Read an offer and check that it is consistent.

    Raises:
        WeightsError: `data` is not an offer, or its root does not follow from those of its ranks.
    """
    offer = decode(Offer, data)
    check_offer(offer)
    return offer


def check_offer(offer: Offer) -> None:
    """Check that ranks are unique, equal if they hold the same boxes, and that the root follows from theirs; and that
    no secret is long.

    Raises:
        WeightsError: naming the version.
    """
    if len({rank.rank for rank in offer.ranks}) != len(offer.ranks):
        raise WeightsError(f"The offer of version {offer.version} lists a rank twice.")
    longest = max((len(rank.secret) for rank in offer.ranks), default=0)
    if longest > MAX_SECRET_CHARACTERS:
        raise WeightsError(
            f"The offer of version {offer.version} has a secret of {longest} characters, expected at most "
            f"{MAX_SECRET_CHARACTERS}."
        )
    if _root(offer.version, offer.ranks) != offer.root:
        raise WeightsError(f"The root {offer.root} of version {offer.version} does not follow from its ranks.")


def digest_of(data: bytes | memoryview) -> str:
    """Return the digest of contiguous bytes, as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def holds_of(pieces: Sequence[ShardPiece]) -> str:
    """Return the digest of the names and boxes of a rank."""
    boxes = sorted((piece.names, piece.dtype, (piece.box.offset, piece.box.size)) for piece in pieces)
    return digest_of(msgspec.msgpack.encode(boxes))


def root_of(proofs: Iterable[tuple[str, Box, bytes]]) -> str:
    """Return the root of boxes of tensors and their digests. Equal copies count once, empty boxes not at all.

    Raises:
        WeightsError: two copies of a box differ.
    """
    digests: dict[tuple[str, tuple[int, ...], tuple[int, ...]], bytes] = {}
    for name, box, digest in proofs:
        if box.volume and digests.setdefault((name, box.offset, box.size), digest) != digest:
            raise WeightsError(f"Two copies of box {box} of tensor {name} differ.")
    state = xxhash.xxh3_128()
    for key in sorted(digests):
        state.update(msgspec.msgpack.encode((key, digests[key])))
    return state.hexdigest()


def make_offer(version: int, ranks: Sequence[RankOffer]) -> Offer:
    """Combine the ranks of one replica.

    Raises:
        WeightsError: two ranks hold different bits of the same boxes.
    """
    ordered = tuple(sorted(ranks, key=lambda rank: rank.rank))
    return Offer(version=version, ranks=ordered, root=_root(version, ordered))


def attested_root(offer: Offer, sent: str, held: str) -> str:
    """Return the root that a destination attests, from the roots of the boxes that it read.

    Args:
        offer: the version that was pulled.
        sent: `root_of` the boxes with the digests that their sources sent.
        held: `root_of` the same boxes with digests of the weights that the destination holds.
    """
    difference = int(offer.root, 16) ^ int(sent, 16) ^ int(held, 16)
    return f"{difference:0{ROOT_CHARACTERS}x}"


def joined_root(offer: Offer, roots: Sequence[str]) -> str:
    """Return the root that a destination of several ranks attests, from the roots of the ranks.

    It is the version's root exactly when each of `roots` is. They are not combined by XOR: ranks that hold copies of
    one box may be wrong in the same way, and would cancel each other out.

    Args:
        offer: the version that was pulled.
        roots: `attested_root` of each rank, at least one.
    """
    return offer.root if {*roots} == {offer.root} else digest_of("".join(roots).encode())


def rank_root(boxes: Iterable[tuple[int, Box, bytes]]) -> str:
    """Return the root of what one destination rank holds: of shard, box and digest of each box that fills its shards.

    It does not depend on the order of the boxes, nor on the names that a tensor has at the source.
    """
    ordered = sorted((shard, box.offset, box.size, digest) for shard, box, digest in boxes if box.volume)
    return digest_of(msgspec.msgpack.encode(ordered))


def layout_root(rank_roots: Sequence[str]) -> str:
    """Return the layout root of a destination, from `rank_root` of each of its ranks, in their order."""
    return digest_of("".join(rank_roots).encode())


def root_of_parts(parts: Sequence[LayoutPart]) -> str:
    """Return the layout root of a destination, from the boxes that each rank of its source sends.

    Raises:
        WeightsError: they are of destinations with other numbers of ranks.
    """
    if len({len(part) for part in parts}) != 1:
        raise WeightsError("The ranks of a source have plans to destinations with different numbers of ranks.")
    return layout_root([rank_root(chain.from_iterable(boxes)) for boxes in zip(*parts, strict=True)])


def _root(version: int, ranks: Sequence[RankOffer]) -> str:
    roots: dict[str, tuple[int, str]] = {}
    for rank in ranks:
        other, root = roots.setdefault(rank.holds, (rank.rank, rank.root))
        if root != rank.root:
            raise WeightsError(
                f"Ranks {other} and {rank.rank} of version {version} hold the same boxes, but other bits in them."
            )
    return digest_of(msgspec.msgpack.encode(sorted((holds, root) for holds, (_, root) in roots.items())))
