"""Publishing LoRA adapters: a separate small stream of versions, independent of the base model's."""

from __future__ import annotations

import pytest
import torch

from starling.common.errors import WeightsError
from starling.weightsync.plan.compact import to_compact
from starling.weightsync.plan.layout import decode_layout, encode, join_ranks
from starling.weightsync.plan.planner import PlanCache, make_plan
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.puller.puller import Puller
from starling.weightsync.tensors.modules import layout_of

DEADLINE_S = 20.0
RANK, WIDTH = 4, 64
PREFIX = "base_model.model.layers.0.q_proj"
Tensors = dict[str, torch.Tensor]


def base() -> Tensors:
    return {"layers.0.q_proj.weight": torch.randn(WIDTH, WIDTH)}


def adapter() -> Tensors:
    return {f"{PREFIX}.lora_A.weight": torch.randn(RANK, WIDTH), f"{PREFIX}.lora_B.weight": torch.randn(WIDTH, RANK)}


class Stream:
    """A publisher and a puller of the same tensors."""

    def __init__(self, trained: Tensors) -> None:
        self.live = {key: torch.zeros_like(tensor) for key, tensor in trained.items()}
        source, destination = layout_of(trained, "trainer"), layout_of(self.live, "engine")
        self.plan = make_plan(source, destination)
        self.publisher, self.puller = Publisher(source, transport="tcp"), Puller(destination)

    def adopt(self, version: int, trained: Tensors) -> int:
        """Adopt a version; return how many bytes travelled."""
        offer = self.publisher.publish(version, trained)
        report = self.puller.pull(offer, self.plan, deadline_s=DEADLINE_S)
        self.puller.switch(self.live)
        assert self.puller.attest(self.live, offer) == offer.root
        return report.size_bytes

    def close(self) -> None:
        self.puller.close()
        self.publisher.close()


def test_adapters_and_base_model_are_published_separately() -> None:
    whole, first = base(), adapter()
    base_stream, adapter_stream = Stream(whole), Stream(first)
    assert base_stream.adopt(0, whole) == WIDTH * WIDTH * 4
    for version in range(1, 4):
        newest = adapter()
        assert adapter_stream.adopt(version, newest) == 2 * RANK * WIDTH * 4, "only the adapter travels"
    assert (base_stream.puller.version, adapter_stream.puller.version) == (0, 3)
    assert all(torch.equal(adapter_stream.live[key], tensor) for key, tensor in newest.items())
    assert all(torch.equal(base_stream.live[key], tensor) for key, tensor in whole.items())
    base_stream.close()
    adapter_stream.close()


def test_plan_between_different_base_models_is_refused() -> None:
    tensors = adapter()
    source = layout_of(tensors, "trainer", base="one")
    same, other = layout_of(tensors, "engine", base="one"), layout_of(tensors, "engine", base="two")
    assert decode_layout(encode(source)) == source
    plans, compact = PlanCache(), to_compact(other)
    assert plans.plan(source, same).total_bytes == 2 * RANK * WIDTH * 4
    assert to_compact(same).digest != compact.digest
    for refused in (other, compact, layout_of(tensors, "engine")):
        with pytest.raises(WeightsError, match="engine has its adapters on other weights than trainer, or scales them"):
            plans.plan(source, refused)


def test_join_of_ranks_with_different_base_models_is_refused() -> None:
    parts = [layout_of({f"{PREFIX}.{n}": torch.ones(2)}, "engine", base="one") for n in range(2)]
    assert join_ranks("engine", parts).base == "one"
    with pytest.raises(WeightsError, match="The ranks of engine have adapters on different base weights"):
        join_ranks("engine", [parts[0], layout_of(adapter(), "engine", base="two")])
