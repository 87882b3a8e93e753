"""Weights of a single tensor, with real layouts, offers and plans that are cheap enough to make thousands of."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

import numpy as np
from msgspec.structs import replace

from starling.common.wire import messages as wire
from starling.weightsync.memory.digests import digest_of_array
from starling.weightsync.offers.offer import (
    Offer,
    RankOffer,
    decode_offer,
    digest_of,
    holds_of,
    layout_root,
    make_offer,
    rank_root,
)
from starling.weightsync.plan.layout import Box, Layout, Place, RankLayout, Shard, TensorSpec, encode, pieces_of
from starling.weightsync.plan.planner import Plan, check_plan, decode_plan, make_plan

FLIPPED: Final = bytes(15) + b"!"
"""Bytes of the tensor that no version has: what a replica sends that lies."""


def num_ranks_of(replica: str) -> int:
    """Return the number of ranks of a simulated replica: every second rollout has other boxes than the policies."""
    role, _, number = replica.rpartition("-")
    return 2 if role == "rollout" and int(number) % 2 else 1


def layout_of(replica: str, shape: tuple[int, ...] = (4,), *, num_ranks: int = 1) -> Layout:
    """Return the layout of one float32 tensor, in equal parts on each rank."""
    spec, size = TensorSpec(name="w", shape=shape, dtype="float32"), shape[0] // num_ranks
    ranks = []
    for rank in range(num_ranks):
        box = Box(offset=(rank * size,), size=(size,))
        shard = Shard(tensor=0, box=box, storage="w", offset_bytes=0, strides=(1,))
        ranks.append(RankLayout(place=Place(host="here"), shards=(shard,)))
    return Layout(replica=replica, tensors=(spec,), ranks=tuple(ranks))


@functools.cache
def encoded_layout(replica: str, shape: tuple[int, ...] = (4,), *, num_ranks: int = 1) -> bytes:
    """Return the encoded layout."""
    return encode(layout_of(replica, shape, num_ranks=num_ranks))


def content_of(version: int) -> bytes:
    """Return the bytes of the tensor in a version."""
    return version.to_bytes(4, "little") * 4


@functools.cache
def offer_of(version: int) -> Offer:
    """Return an offer of the weights of a version."""
    rank = RankOffer(
        rank=0,
        transport="local",
        address="/",
        secret="s",
        snapshot=version,
        holds=holds_of(pieces_of(layout_of("policy-0"), 0)),
        root=digest_of(content_of(version)),
    )
    return make_offer(version, (rank,))


@functools.cache
def encoded_offer(version: int) -> bytes:
    """Return the encoded offer."""
    return encode(offer_of(version))


@functools.cache
def encoded_relay_offer(version: int, num_ranks: int) -> bytes:
    """Return the encoded offer of a relay: each rank says the root of the version that it is pulling."""
    [rank], layout = offer_of(version).ranks, layout_of("rollout-0", num_ranks=num_ranks)
    ranks = [
        replace(rank, rank=number, holds=holds_of(pieces_of(layout, number)), root=offer_of(version).root)
        for number in range(num_ranks)
    ]
    return encode(make_offer(version, ranks))


@functools.cache
def encoded_plan(source: str, destination: str) -> bytes:
    """Return the encoded plan between two replicas of equal layouts."""
    return encode(make_plan(layout_of(source), layout_of(destination)))


@functools.lru_cache(maxsize=4096)
def layout_root_of(encoded_plan: bytes, content: bytes) -> str:
    """Return the layout root, by the boxes of a plan, of a tensor with these bytes."""
    plan, tensor = decode_plan(encoded_plan), np.frombuffer(content, np.float32)
    roots = []
    for rank in plan.ranks:
        transfers = [transfer for bucket in plan.of_destination(rank) for transfer in bucket.transfers]
        cuts = [slice(t.box.offset[0], t.box.offset[0] + t.box.size[0]) for t in transfers]
        boxes = zip(transfers, cuts, strict=True)
        roots.append(rank_root((t.destination_shard, t.box, digest_of_array(tensor[cut])) for t, cut in boxes))
    return layout_root(roots)


def published(command: wire.PublishWeights, plans: Sequence[bytes]) -> wire.WeightsPublished:
    """Return the answer of a policy that publishes a version, with the layout roots that were asked for."""
    content = content_of(command.version)
    roots = {key: layout_root_of(plan, content) for key, plan in zip(command.layouts, plans, strict=True)}
    return wire.WeightsPublished(lease=command.lease, version=command.version, publish_s=0.0, layout_roots=roots)


def adopted(command: wire.AdoptWeights, buffers: Sequence[bytes], content: bytes | None = None) -> wire.WeightsAdopted:
    """Return the answer of a replica that has adopted a version and holds `content`, by default the true one.

    It holds what its source sent, so its root is that of the offer in any case.
    """
    held = content_of(command.version) if content is None else content
    return wire.WeightsAdopted(
        lease=command.lease,
        version=command.version,
        root=decode_offer(buffers[0]).root,
        pull_s=0.0,
        pause_s=0.0,
        size_bytes=16,
        transport="local",
        layout_root=layout_root_of(buffers[1 + command.has_root_plan], held),
        source=command.relays[0] if command.relays else command.source,
        layout=command.layout,
    )


@functools.lru_cache(maxsize=4096)
def checked_plan(encoded: bytes, source: str, destination: str) -> Plan:
    """Return the plan by which `destination` pulls from `source`. Raises WeightsError if it does not fit the two."""
    plan, layout = decode_plan(encoded), layout_of(destination, num_ranks=num_ranks_of(destination))
    held = layout_of(source, num_ranks=num_ranks_of(source))
    pieces = {rank: pieces_of(held, rank) for rank in range(len(held.ranks))}
    for rank in plan.ranks:
        check_plan(plan, pieces, layout, rank)
    return plan
