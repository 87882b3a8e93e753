"""Switching in parts: into memory that exists only briefly, as in an engine that repacks weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from weights_peers import blank, same, weights

from starling.common.errors import WeightsError
from starling.weightsync.offers.offer import Offer
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.puller.puller import Puller
from starling.weightsync.tensors.modules import layout_of

torch.set_num_threads(1)
DEADLINE_S = 30.0


class Engine:
    """An engine without lasting tensors: each is allocated for its part, and copied."""

    def __init__(self, per_part: int) -> None:
        self.per_part = per_part
        self.packed: dict[str, torch.Tensor] = {}

    def parts(self, but: str = "") -> Iterator[dict[str, torch.Tensor]]:
        """Yield memory for all tensors, except `but`."""
        names = [name for name in blank() if name != but]
        for begin in range(0, len(names), self.per_part):
            made = {name: torch.empty_like(blank()[name]) for name in names[begin : begin + self.per_part]}
            yield made
            self.packed |= {name: tensor.clone() for name, tensor in made.items()}
            for tensor in made.values():
                tensor.zero_()  # the engine has repacked it


def staged(puller: Puller, publisher: Publisher, version: int) -> Offer:
    """Publish and pull a version."""
    offer = publisher.publish(version, weights(version))
    plan = make_plan(publisher.layout, layout_of(blank(), "rollout-0"), bucket_bytes=4096)
    puller.pull(offer, plan, deadline_s=DEADLINE_S)
    return offer


@pytest.mark.parametrize("per_part", [1, 3, 100])
def test_every_part_is_filled_and_attested(per_part: int) -> None:
    engine = Engine(per_part)
    with (
        Publisher(layout_of(weights(0), "policy-0"), transport="local") as publisher,
        closing(Puller(layout_of(blank(), "rollout-0"))) as puller,
    ):
        for version in range(3):
            offer = staged(puller, publisher, version)
            assert puller.switch_in_parts(engine.parts(), offer).root == offer.root
            assert (puller.version, puller.state) == (version, "current")
            assert same(engine.packed, weights(version))


def test_flipped_bit_in_a_part_fails_the_attestation() -> None:
    with (
        Publisher(layout_of(weights(0), "policy-0"), transport="local") as publisher,
        closing(Puller(layout_of(blank(), "rollout-0"))) as puller,
    ):
        offer = staged(puller, publisher, 0)
        assert puller._staging is not None
        puller._staging[0] ^= 1
        assert puller.switch_in_parts(Engine(2).parts(), offer).root != offer.root


def test_missing_part_leaves_the_replica_torn() -> None:
    name = next(iter(blank()))
    with (
        Publisher(layout_of(weights(0), "policy-0"), transport="local") as publisher,
        closing(Puller(layout_of(blank(), "rollout-0"))) as puller,
    ):
        offer = staged(puller, publisher, 0)
        with pytest.raises(WeightsError, match=f"Nothing was given for {name} of rollout-0"):
            puller.switch_in_parts(Engine(2).parts(but=name), offer)
        assert (puller.version, puller.state) == (-1, "torn")
        assert puller.switch_in_parts(Engine(2).parts(), offer).root == offer.root  # the staged version is kept
        with pytest.raises(WeightsError, match="no staged version"):
            puller.switch_in_parts(Engine(2).parts(), offer)
