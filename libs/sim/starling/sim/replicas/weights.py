"""Weights of a single tensor, with real layouts, offers and plans that are cheap enough to make thousands of."""

from __future__ import annotations

import functools

from starling.weightsync.plan.layout import Box, Layout, Place, RankLayout, Shard, TensorSpec, encode, pieces_of
from starling.weightsync.plan.offer import Offer, RankOffer, digest_of, holds_of, make_offer
from starling.weightsync.plan.planner import Plan, check_plan, decode_plan


def layout_of(replica: str, shape: tuple[int, ...] = (4,)) -> Layout:
    """Return the layout of one rank that holds one float32 tensor."""
    box = Box(offset=(0,) * len(shape), size=shape)
    shard = Shard(tensor=0, box=box, storage="w", offset_bytes=0, strides=(1,))
    spec = TensorSpec(name="w", shape=shape, dtype="float32")
    return Layout(replica=replica, tensors=(spec,), ranks=(RankLayout(place=Place(host="here"), shards=(shard,)),))


@functools.cache
def encoded_layout(replica: str, shape: tuple[int, ...] = (4,)) -> bytes:
    """Return the encoded layout."""
    return encode(layout_of(replica, shape))


@functools.cache
def offer_of(version: int) -> Offer:
    """Return an offer of weights whose bytes are the version."""
    rank = RankOffer(
        rank=0,
        transport="local",
        address="/",
        token="t",
        snapshot=version,
        holds=holds_of(pieces_of(layout_of("policy-0"), 0)),
        root=digest_of(version.to_bytes(4, "little") * 4),
    )
    return make_offer(version, (rank,))


@functools.cache
def encoded_offer(version: int) -> bytes:
    """Return the encoded offer."""
    return encode(offer_of(version))


@functools.lru_cache(maxsize=4096)
def checked_plan(encoded: bytes, source: str, destination: str) -> Plan:
    """Return the plan by which `destination` pulls from `source`. Raises WeightsError if it does not fit the two."""
    plan, layout = decode_plan(encoded), layout_of(destination)
    check_plan(plan, {0: pieces_of(layout_of(source), 0)}, layout, 0)
    return plan
