"""Engine of rollouts on another host than the policy, with another layout; `rollout-0` forges what it passes on.

Everything that it says is right: its versions, its own digests, its proofs. One bit of each version that it offers to
other rollouts is flipped.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

import torch
from msgspec.structs import replace

from starling.rollout.engine.base import Engine, EngineSpec
from starling.rollout.engine.embedded.engine import transformers_engine
from starling.rollout.engine.weights import LiveWeights
from starling.weightsync.plan.layout import Box, Layout, Shard, item_bytes


def forging_engine(spec: EngineSpec) -> Engine:
    """Return an engine whose tensors are cut in halves."""
    socket.gethostname = lambda: "the host of the rollouts"
    engine: Any = transformers_engine(spec)
    tensors = engine.tensors
    engine._weights = LiveWeights(in_halves(engine.layout()), tensors, digests=spec.weights.digests)
    if spec.name == "rollout-0":
        engine.tensors = lambda: forged(tensors())
    made: Engine = engine
    return made


def forged(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a copy of the weights with one flipped bit."""
    copy = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    next(iter(copy.values())).view(-1).view(torch.uint8)[0] ^= 1
    return copy


def in_halves(layout: Layout) -> Layout:
    """Return the layout with the rows of each tensor in two boxes."""
    [rank] = layout.ranks
    halves = [half for shard in rank.shards for half in halves_of(shard, item_bytes(layout.tensors[shard.tensor]))]
    return replace(layout, ranks=(replace(rank, shards=tuple(halves)),))


def halves_of(shard: Shard, size_bytes: int) -> list[Shard]:
    """Return the two halves of a shard whose elements have this size."""
    (begin, *offset), (num, *size) = shard.box.offset, shard.box.size
    first = replace(shard, box=Box(offset=(begin, *offset), size=(num // 2, *size)))
    second = replace(
        shard,
        box=Box(offset=(begin + num // 2, *offset), size=(num - num // 2, *size)),
        offset_bytes=shard.offset_bytes + num // 2 * shard.strides[0] * size_bytes,
    )
    return [first, second]
