"""Quantisation recipes, and the layouts that are published and received by them."""

from __future__ import annotations

import random
import subprocess
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from quantised_models import layout, source_layout, storages
from test_quantise import SMALL_FORMATS

from starling.common.errors import WeightsError
from starling.weightsync.layouts.families import model_of
from starling.weightsync.layouts.presets import PRESETS
from starling.weightsync.layouts.symbolic import compact_layout, model_layout, shard_layout
from starling.weightsync.layouts.vllm import worker_layout
from starling.weightsync.plan.boxes import first_gap
from starling.weightsync.plan.compact import to_compact
from starling.weightsync.plan.layout import (
    Box,
    Layout,
    Shard,
    TensorSpec,
    check_layout,
    decode_layout,
    encode,
    item_bytes,
)
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.quantise.formats import FORMATS, FP8_BLOCK, FP8_ROW, MXFP4, NVFP4, QuantFormat
from starling.weightsync.quantise.layouts import (
    published_layout,
    published_splits,
    quantisation_of,
    received_layout,
    received_splits,
)
from starling.weightsync.quantise.recipe import FUSED_BY_VLLM, QuantRecipe, QuantRule, linear_weights
from starling.weightsync.quantise.schedule import make_schedule

TINY = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_experts": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
}


def spec_of(name: str, *shape: int, same_as: str = "") -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype="bfloat16", same_as=same_as)


def every(form: QuantFormat) -> QuantRecipe:
    return QuantRecipe(rules=(QuantRule(pattern="", format=form),))


@pytest.mark.sample(3)
@pytest.mark.parametrize("preset", PRESETS)
def test_only_linear_weights_are_quantised(preset: str) -> None:
    recipe = linear_weights("fp8_block")
    quantised = {
        weight.spec.name.split(".")[-2] for weight in model_of(PRESETS[preset]).weights if recipe.format_of(weight.spec)
    }
    dense = {"gate_proj", "up_proj", "down_proj", "o_proj"}
    latent = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"}
    assert quantised == dense | (latent if preset in ("deepseek-v3", "kimi-k2") else {"q_proj", "k_proj", "v_proj"})


@pytest.mark.parametrize(
    ("name", "shape", "quantised"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (64, 64), True),
        ("model.layers.0.mlp.experts.3.down_proj.weight", (64, 64), True),
        ("model.layers.0.mlp.shared_experts.gate_proj.weight", (64, 64), True),
        ("model.layers.0.self_attn.q_proj.bias", (64,), False),
        ("model.layers.0.mlp.gate.weight", (4, 64), False),
        ("model.layers.0.mlp.shared_expert_gate.weight", (1, 64), False),
        ("model.layers.0.block_sparse_moe.router.weight", (4, 64), False),
        ("model.embed_tokens.weight", (128, 64), False),
        ("transformer.wte.weight", (128, 64), False),
        ("visual.patch_embed.proj.weight", (64, 3, 2, 14, 14), False),
        ("lm_head.weight", (128, 64), False),
        ("model.norm.weight", (64,), False),
        ("transformer_blocks.0.attn.to_q.weight", (64, 64), True),
        ("scalar.weight", (), False),
    ],
)
def test_tensors_quantised_by_the_preset(name: str, shape: tuple[int, ...], quantised: bool) -> None:
    assert (linear_weights(FP8_ROW).format_of(spec_of(name, *shape)) is FP8_ROW) == quantised


def test_the_first_rule_that_matches_wins() -> None:
    rules = (
        QuantRule(pattern=r"down_proj", format=None),
        QuantRule(pattern=r"experts\.", format=MXFP4),
        QuantRule(pattern="proj", format=FP8_ROW),
    )
    recipe = msgspec.msgpack.decode(msgspec.msgpack.encode(QuantRecipe(rules=rules)), type=QuantRecipe)
    names = ("experts.0.down_proj.weight", "experts.0.up_proj.weight", "q_proj.weight", "embed.weight")
    assert [recipe.format_of(spec_of(name, 8, 8)) for name in names] == [None, MXFP4, FP8_ROW, None]


def test_invalid_recipes_are_refused() -> None:
    with pytest.raises(WeightsError, match=r"The pattern '\(proj' is not a regular expression"):
        QuantRecipe(rules=(QuantRule(pattern="(proj", format=None),))
    for pattern in ("q_proj", "(q|k)_(proj)"):
        with pytest.raises(WeightsError, match=r"must have one group, of what differs between the names"):
            linear_weights("nvfp4", together=(pattern,))
    with pytest.raises(WeightsError, match=r"There is no format 'fp7'; choose one of fp8_row, fp8_block"):
        linear_weights("fp7")
    with pytest.raises(WeightsError, match=r"Tensor w is int8; to be quantised it must be one of bfloat16"):
        quantisation_of([TensorSpec(name="w", shape=(8, 8), dtype="int8")], every(FP8_ROW))


def test_tensors_fused_by_vllm_have_one_scale() -> None:
    names = [
        *(f"model.layers.{i}.self_attn.{name}_proj.weight" for i in range(2) for name in "qkvo"),
        *(f"experts.{i}.{name}_proj.weight" for i in range(2) for name in ("gate", "up", "down")),
        *(f"self_attn.{name}.weight" for name in ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj")),
    ]
    specs = [spec_of(name, 16, 16) for name in names]
    found = quantisation_of(specs, linear_weights("nvfp4", together=FUSED_BY_VLLM)).scale_of
    assert found == (0, 0, 0, 3, 4, 4, 4, 7, 8, 8, 10, 11, 11, 13, 14, 14, 16)
    assert quantisation_of(specs, linear_weights("nvfp4")).scale_of == tuple(range(len(names)))


def test_tied_tensors_stay_tied() -> None:
    made = quantisation_of([spec_of("a", 8, 32), spec_of("b", 8, 32, same_as="a"), spec_of("c", 4)], every(NVFP4))
    found = [(spec.name, spec.same_as) for spec in made.tensors]
    assert found == [
        *(("a" + end, "") for end in ("", "_scale", "_scale_2")),
        *(("b" + end, "a" + end) for end in ("", "_scale", "_scale_2")),
        ("c", ""),
    ]
    check_layout(Layout(replica="policy-0", tensors=made.tensors, ranks=()))


@given(seed=st.integers(0, 1 << 30), num_ranks=st.integers(1, 4), form=st.sampled_from(SMALL_FORMATS))
@examples(100)
def test_every_code_and_scale_is_published(seed: int, num_ranks: int, form: QuantFormat) -> None:
    draw = random.Random(seed)
    shapes = ((13, 22), (8, 24), (5, 7), (9, 1), (3, 7, 10))
    specs = [spec_of(name, *draw.choice(shapes)) for name in ("a", "b")]
    source = source_layout(draw, specs, num_ranks)
    published = published_layout(source, every(form))
    check_layout(published)
    assert decode_layout(encode(published)) == published
    boxes: dict[int, list[Box]] = {}
    for held in published.ranks:
        end = 0
        for shard in held.shards:
            boxes.setdefault(shard.tensor, []).append(shard.box)
            assert shard.offset_bytes >= end
            end = shard.offset_bytes + shard.box.volume * item_bytes(published.tensors[shard.tensor])
    for index, spec in enumerate(published.tensors):
        assert first_gap(Box(offset=(0,) * len(spec.shape), size=spec.shape), boxes[index]) is None


@given(seed=st.integers(0, 1 << 30), num_ranks=st.integers(1, 4), form=st.sampled_from(SMALL_FORMATS))
@examples(100)
def test_schedules_of_ranks_match(seed: int, num_ranks: int, form: QuantFormat) -> None:
    draw = random.Random(seed)
    specs = [spec_of(name, *draw.choice(((13, 22), (8, 24), (3, 7, 10)))) for name in ("a", "b")]
    source = source_layout(draw, specs, num_ranks)
    made = quantisation_of(specs, every(form))
    schedules = [make_schedule(source, rank, made) for rank in range(num_ranks)]
    assert len({schedule.num_rounds for schedule in schedules}) == 1
    for one, first in enumerate(schedules):
        for other, second in enumerate(schedules):
            sends = [(source.ranks[one].shards[p.shard].tensor, p.groups) for p in first.sends[other]]
            receives = [(source.ranks[other].shards[p.shard].tensor, p.groups) for p in second.receives[one]]
            assert sends == receives
            assert first.reports[other] == second.collects[one]
    if not schedules[0].num_rounds:
        apart = [(a, b) for a, s in enumerate(schedules) for b in range(num_ranks) if a != b and s.sends[b]]
        assert apart == []


# --- where the parts of fused parameters lie ------------------------------------------------------------------------


def fused(*parts: tuple[Box, int, tuple[int, int]], names: str = "abcdef") -> Layout:
    """Boxes of tensors in one storage: each with its first element there, and the tensor's shape."""
    specs = [spec_of(f"{name}.weight", *shape) for name, (_, _, shape) in zip(names, parts, strict=False)]
    columns = parts[0][0].size[1]
    shards = [
        Shard(tensor=i, box=box, storage="fused", offset_bytes=2 * first, strides=(columns, 1))
        for i, (box, first, _) in enumerate(parts)
    ]
    return layout("rollout-0", specs, [shards])


def whole(rows: int, columns: int) -> Box:
    return Box(offset=(0, 0), size=(rows, columns))


def spots(received: Layout) -> dict[str, tuple[str, int, tuple[int, ...]]]:
    return {
        received.tensors[shard.tensor].name: (shard.storage, shard.offset_bytes, shard.strides)
        for shard in received.ranks[0].shards
    }


def test_fused_parameters_have_fused_scales() -> None:
    one = fused((whole(256, 384), 0, (256, 384)), (whole(128, 384), 256 * 384, (128, 384)))
    assert spots(received_layout(one, every(FP8_BLOCK))) == {
        "a.weight": ("fused", 0, (384, 1)),
        "a.weight_scale_inv": ("fused_scale_inv", 0, (3, 1)),
        "b.weight": ("fused", 256 * 384, (384, 1)),
        "b.weight_scale_inv": ("fused_scale_inv", 4 * 2 * 3, (3, 1)),
    }
    assert spots(received_layout(one, every(NVFP4))) == {
        "a.weight": ("fused", 0, (192, 1)),
        "a.weight_scale": ("fused_scale", 0, (24, 1)),
        "a.weight_scale_2": ("fused_scale_2", 0, ()),
        "b.weight": ("fused", 256 * 192, (192, 1)),
        "b.weight_scale": ("fused_scale", 256 * 24, (24, 1)),
        "b.weight_scale_2": ("fused_scale_2", 4, ()),
    }


def test_part_of_a_block_has_the_scale_of_the_block() -> None:
    box = Box(offset=(100, 0), size=(100, 384))
    received = received_layout(fused((box, 0, (256, 384)), (box, 100 * 384, (256, 384))), every(FP8_BLOCK))
    scales = [shard for shard in received.ranks[0].shards if shard.storage == "fused_scale_inv"]
    assert [str(shard.box) for shard in scales] == ["[0:2, 0:3]", "[0:2, 0:3]"]
    assert [shard.offset_bytes for shard in scales] == [0, 4 * 2 * 3]


@pytest.mark.parametrize("form", ["fp8_row", "fp8_block", "nvfp4", "mxfp4"])
def test_fused_and_stacked_parameters_of_an_engine_are_filled(form: str) -> None:
    engine = worker_layout(TINY, "rollout-0", tp=2)
    received = received_layout(engine, linear_weights(form))
    for rank, held in enumerate(received.ranks):
        room = {name: tensor.numel() for name, tensor in storages(received, rank).items()}
        filled = dict.fromkeys(room, 0)
        for shard in held.shards:
            filled[shard.storage] += shard.box.volume
        assert filled == room
        suffix = "_scale_inv" if form == "fp8_block" else "_scale"
        fused = {name for name in room if name.endswith(suffix)}
        layers = [f"model.layers.{i}." for i in range(2)]
        parameters = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.experts.routed_experts.w13")
        assert {f"{at}{name}.weight{suffix}" for at in layers for name in parameters[:2]} <= fused
        assert {f"{at}{parameters[2]}_weight{suffix}" for at in layers} <= fused


def test_transposed_memory_stays_transposed() -> None:
    shard = Shard(tensor=0, box=whole(6, 64), storage="w", offset_bytes=0, strides=(1, 6))
    received = received_layout(layout("rollout-0", [spec_of("w", 6, 64)], [[shard]]), every(MXFP4))
    assert [shard.strides for shard in received.ranks[0].shards] == [(1, 6), (1, 6)]


def test_storages_that_cannot_be_arranged_are_refused() -> None:
    one = fused((whole(4, 64), 0, (4, 64)), (whole(4, 64), 256, (4, 64)))
    mixed = QuantRecipe(rules=(QuantRule(pattern="a", format=MXFP4),))
    with pytest.raises(
        WeightsError, match=r"Storage fused of rollout-0 holds a.weight and b.weight.*different formats"
    ):
        received_layout(one, mixed)
    with pytest.raises(WeightsError, match=r"\[0:4, 0:64\] of b.weight is not in rows of storage fused"):
        received_layout(fused((whole(4, 64), 0, (4, 64)), (whole(4, 64), 263, (4, 64))), every(MXFP4))
    shards = [
        Shard(tensor=i, box=whole(4, n), storage="flat", offset_bytes=1024 * i, strides=(n, 1))
        for i, n in enumerate((64, 32))
    ]
    two = layout("rollout-0", [spec_of("a", 4, 64), spec_of("b", 4, 32)], [shards])
    with pytest.raises(WeightsError, match=r"\[0:4, 0:32\] of b is not in rows of storage flat"):
        received_layout(two, every(MXFP4))


# --- models that are not there yet ----------------------------------------------------------------------------------


@pytest.mark.sample(5)
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize(("source", "destination"), [("fsdp4", "tp2"), ("ep2 fsdp3", "tep2"), ("hsdp2x3", "pp2 tp2")])
def test_compact_quantised_plans_equal_those_of_the_layouts(form: QuantFormat, source: str, destination: str) -> None:
    recipe = linear_weights(form)
    held, wanted = (model_layout(TINY, words) for words in (source, destination))
    predicted = (
        published_splits(compact_layout(held, "policy-0"), recipe),
        received_splits(compact_layout(wanted, "rollout-0"), recipe),
    )
    real = tuple(
        to_compact(made)
        for made in (
            published_layout(shard_layout(held, "policy-0"), recipe),
            received_layout(shard_layout(wanted, "rollout-0"), recipe),
        )
    )
    for one, other in zip(predicted, real, strict=True):
        assert one.tensors == other.tensors
        assert not other.orders
    plans = [make_plan(*pair, bucket_bytes=4096) for pair in (predicted, real)]
    assert plans[0].total_bytes == plans[1].total_bytes
    assert np.array_equal(plans[0].pair_bytes, plans[1].pair_bytes)
    assert (
        plans[0].total_bytes
        < 0.8 * make_plan(compact_layout(held, "policy-0"), compact_layout(wanted, "rollout-0")).total_bytes
    )


def test_quantised_layouts_need_no_torch() -> None:
    code = (
        "import sys, starling.weightsync.quantise.layouts, starling.weightsync.quantise.schedule;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
