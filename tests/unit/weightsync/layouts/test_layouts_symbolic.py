"""Layouts from a configuration and a parallelism in words, and of vLLM workers."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from covering import covering

from starling.common.errors import WeightsError
from starling.weightsync.layouts.families import model_of
from starling.weightsync.layouts.parallelism import even_stages
from starling.weightsync.layouts.presets import PRESETS
from starling.weightsync.layouts.symbolic import (
    Parallelism,
    compact_layout,
    model_layout,
    parse_parallelism,
    shard_layout,
)
from starling.weightsync.layouts.vllm import worker_layout, worker_table
from starling.weightsync.plan.compact import check_compact, to_compact
from starling.weightsync.plan.layout import Layout, Place, check_layout
from starling.weightsync.plan.planner import make_plan

DENSE: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
EXPERTS: dict[str, Any] = {**DENSE, "model_type": "qwen3_moe", "num_experts": 6, "moe_intermediate_size": 4}
LATENT: dict[str, Any] = PRESETS["deepseek-v3"] | {
    "hidden_size": 8,
    "intermediate_size": 16,
    "moe_intermediate_size": 4,
    "n_routed_experts": 6,
    "vocab_size": 100,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "q_lora_rank": 6,
    "kv_lora_rank": 4,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
}
CONFIGS = {"dense": DENSE, "tied": {**DENSE, "tie_word_embeddings": True}, "experts": EXPERTS, "latent": LATENT}


@pytest.mark.parametrize(
    ("text", "axes", "replicas"),
    [
        ("fsdp256", (("fsdp", 256),), 1),
        ("hsdp4x64", (("dp", 4), ("fsdp", 64)), 1),
        ("tp8 x16", (("tp", 8),), 16),
        ("ep64 fsdp4", (("ep", 64), ("fsdp", 4)), 1),
        ("x2 pp4 tp8", (("pp", 4), ("tp", 8)), 2),
        ("", (("dp", 1),), 1),
    ],
)
def test_parse_parallelism(text: str, axes: tuple[tuple[Any, int], ...], replicas: int) -> None:
    assert parse_parallelism(text) == Parallelism(axes=axes, num_replicas=replicas)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fsdp", "'fsdp' in 'fsdp' is not a parallelism"),
        ("tp8,x2", "is not a parallelism"),
        ("tp0", "size of zero"),
        ("hsdp0x2", "size of zero"),
        ("tp2 tp4", "names an axis twice"),
        ("tp2 tep4", "names an axis twice"),
        ("dp2 hsdp2x2", "names an axis twice"),
        ("x2 x4", "is repeated in"),
        ("x0", "size of zero"),
    ],
)
def test_invalid_parallelism_is_refused(text: str, message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        parse_parallelism(text)


def held(layout: Layout, name: str) -> list[str]:
    """What each rank holds of one tensor, as text."""
    index = [spec.name for spec in layout.tensors].index(name)
    return [" ".join(str(shard.box) for shard in rank.shards if shard.tensor == index) for rank in layout.ranks]


@pytest.mark.parametrize(
    ("config", "parallelism", "name", "expected"),
    [
        ("dense", "fsdp3", "lm_head.weight", ["[0:34, 0:8]", "[34:68, 0:8]", "[68:100, 0:8]"]),
        ("dense", "tp2", "model.layers.0.self_attn.q_proj.weight", ["[0:4, 0:8]", "[4:8, 0:8]"]),
        ("dense", "tp2", "model.layers.0.self_attn.o_proj.weight", ["[0:8, 0:4]", "[0:8, 4:8]"]),
        ("dense", "tp4", "model.layers.0.self_attn.k_proj.bias", ["[0:2]", "[0:2]", "[2:4]", "[2:4]"]),
        ("dense", "tp2", "model.layers.0.input_layernorm.weight", ["[0:8]", "[0:8]"]),
        ("dense", "pp3", "model.layers.1.mlp.up_proj.weight", ["", "[0:16, 0:8]", ""]),
        ("dense", "pp2", "model.embed_tokens.weight", ["[0:100, 0:8]", ""]),
        ("tied", "pp2", "model.embed_tokens.weight", ["[0:100, 0:8]", "[0:100, 0:8]"]),
        ("dense", "fsdp2 tp2", "model.layers.0.mlp.up_proj.weight",
         ["[0:4, 0:8]", "[8:12, 0:8]", "[4:8, 0:8]", "[12:16, 0:8]"]),
        ("dense", "tp2 fsdp2", "model.layers.0.mlp.up_proj.weight",
         ["[0:4, 0:8]", "[4:8, 0:8]", "[8:12, 0:8]", "[12:16, 0:8]"]),
        ("experts", "ep2 fsdp2", "model.layers.0.mlp.experts.4.up_proj.weight", ["", "", "[0:2, 0:8]", "[2:4, 0:8]"]),
        ("experts", "ep2 fsdp2", "model.norm.weight", ["[0:2]", "[2:4]", "[4:6]", "[6:8]"]),
        ("experts", "ep2", "model.norm.weight", ["[0:8]", "[0:8]"]),
        ("experts", "tep2", "model.layers.0.mlp.experts.2.down_proj.weight", ["[0:8, 0:4]", ""]),
        ("experts", "tep2", "model.layers.0.self_attn.q_proj.weight", ["[0:4, 0:8]", "[4:8, 0:8]"]),
        ("experts", "ep4", "model.layers.2.mlp.experts.5.down_proj.weight", ["", "", "", "[0:8, 0:4]"]),
        ("latent", "tp2", "model.layers.1.self_attn.kv_b_proj.weight", ["[0:16, 0:4]", "[16:32, 0:4]"]),
        ("latent", "tp2", "model.layers.1.self_attn.kv_a_proj_with_mqa.weight", ["[0:6, 0:8]", "[0:6, 0:8]"]),
    ],
)  # fmt: skip
def test_boxes_of_a_parallelism(config: str, parallelism: str, name: str, expected: list[str]) -> None:
    assert held(shard_layout(model_layout(CONFIGS[config], parallelism), "r"), name) == expected


PARALLELISMS = [
    "fsdp3",
    "hsdp2x2",
    "tp2",
    "tp4",
    "ep2 fsdp2",
    "fsdp2 ep3",
    "ep6",
    "tep2",
    "pp2 tp2",
    "fsdp2 tp2",
    "dp2",
]


@pytest.mark.parametrize(("config", "parallelism"), covering(CONFIGS, PARALLELISMS))
def test_compact_and_shard_layouts_agree_and_cover_the_model(config: str, parallelism: str) -> None:
    symbolic = model_layout(CONFIGS[config], parallelism)
    places = [Place(host=f"h{rank}") for rank in range(symbolic.parallelism.num_ranks)]
    layout, compact = shard_layout(symbolic, "r", places), compact_layout(symbolic, "r", places)
    check_layout(layout)
    check_compact(compact)
    assert to_compact(layout).digest == compact.digest
    make_plan(layout, shard_layout(model_layout(CONFIGS[config], ""), "all"))  # raises where an element is missing


@pytest.mark.campaign
def test_trillion_parameter_layout_has_few_splits() -> None:
    for parallelism, num_boxes in (("fsdp256", 69_975 * 256), ("ep64 fsdp4", 60 * 384 * 3 * 4 + 855 * 256)):
        symbolic = model_layout(PRESETS["kimi-k2"], parallelism)
        compact = compact_layout(symbolic, "policy")
        assert len(compact.splits) < 200
        boxes = np.array([len(split.rank) for split in compact.splits])[compact.split_of]
        assert 0.9 * num_boxes < boxes.sum() <= num_boxes
        assert symbolic.model.num_parameters * 2 <= compact.piece_bytes.sum() < symbolic.model.num_parameters * 2.001


@pytest.mark.parametrize(
    ("config", "parallelism", "message"),
    [
        (DENSE, "tp3", "q_proj.weight: 4 heads cannot be shared by 3 ranks"),
        (
            {**DENSE, "num_attention_heads": 6, "num_key_value_heads": 4, "head_dim": 2},
            "tp6",
            "4 heads cannot be shared",
        ),
        (DENSE, "pp4", "3 layers cannot make a pipeline of 4"),
        (EXPERTS, "ep2 tp2 fsdp2", "ep and fsdp are not adjacent"),
    ],
)
def test_unfit_parallelism_is_refused(config: dict[str, Any], parallelism: str, message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        model_layout(config, parallelism)


def test_even_stages() -> None:
    table = {(8, 4): (2, 2, 2, 2), (5, 2): (3, 2), (6, 4): (1, 2, 2, 1), (7, 4): (2, 2, 2, 1), (9, 4): (2, 2, 3, 2)}
    assert {key: even_stages(*key) for key in table} == table
    layout = shard_layout(model_layout(DENSE, "pp2", layers_of_stages=(1, 2)), "r")
    assert held(layout, "model.layers.1.mlp.up_proj.weight") == ["", "[0:16, 0:8]"]
    with pytest.raises(WeightsError, match=r"Stages of \(1, 1\) layers do not fit 3 layers"):
        model_layout(DENSE, "pp2", layers_of_stages=(1, 1))


def filled(config: dict[str, Any], rank: int, full: dict[str, Any], **sizes: Any) -> dict[str, Any]:
    """The parameters of one worker, filled by its table; -1 where nothing lies."""
    made = {}
    for parameter in worker_table(config, rank, **sizes).parameters:
        array = np.full(parameter.shape, -1.0)
        for part in parameter.parts:
            box = tuple(slice(o, o + n) for o, n in zip(part.box.offset, part.box.size, strict=True))
            size = [1] * array.ndim
            for dim, n in zip(part.dims, part.box.size, strict=True):
                size[dim] = n
            at = tuple(slice(o, o + n) for o, n in zip(part.offset, size, strict=True))
            assert (array[at] == -1).all()
            array[at] = full[part.tensor][box].reshape(size)
        made[parameter.name] = array
    return made


def tensors_of(config: dict[str, Any]) -> dict[str, Any]:
    random = np.random.default_rng(5)
    return {weight.spec.name: random.random(weight.spec.shape) for weight in model_of(config).weights}


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_fused_parameters_of_workers(tp: int) -> None:
    """Each parameter from its definition: head by head for attention, share by share for the rest."""
    full = tensors_of(DENSE)
    at = "model.layers.1"
    heads, kv_heads, head = 4, 2, 2
    for rank in range(tp):
        made = filled(DENSE, rank, full, tp=tp)
        for kind in ("weight", "bias"):
            q, k, v = (full[f"{at}.self_attn.{n}_proj.{kind}"] for n in "qkv")
            mine = heads // tp
            first = rank * kv_heads // tp
            kv = slice(first * head, (first + max(1, kv_heads // tp)) * head)
            expected = np.concatenate([q[rank * mine * head : (rank + 1) * mine * head], k[kv], v[kv]])
            assert np.array_equal(made[f"{at}.self_attn.qkv_proj.{kind}"], expected)
        gate, up = full[f"{at}.mlp.gate_proj.weight"], full[f"{at}.mlp.up_proj.weight"]
        expected = np.concatenate([np.split(gate, tp)[rank], np.split(up, tp)[rank]])
        assert np.array_equal(made[f"{at}.mlp.gate_up_proj.weight"], expected)
        down = full[f"{at}.mlp.down_proj.weight"]
        assert np.array_equal(made[f"{at}.mlp.down_proj.weight"], np.split(down, tp, axis=1)[rank])
        padded = np.concatenate([full["lm_head.weight"], np.full((28, 8), -1.0)])
        assert np.array_equal(made["lm_head.weight"], np.split(padded, tp)[rank])
        assert len(made) == 3 + 3 * 7


@pytest.mark.parametrize("whole_experts", [False, True])
def test_stacked_experts_of_workers(whole_experts: bool) -> None:
    full = tensors_of(EXPERTS)
    names = [f"model.layers.2.mlp.experts.{e}" for e in range(6)]
    for rank in range(2):
        made = filled(EXPERTS, rank, full, tp=2, whole_experts=whole_experts)
        mine = names[3 * rank : 3 * rank + 3] if whole_experts else names
        part = 4 if whole_experts else 2
        rows = slice(0, 4) if whole_experts else slice(rank * 2, rank * 2 + 2)
        w13 = made["model.layers.2.mlp.experts.routed_experts.w13_weight"]
        w2 = made["model.layers.2.mlp.experts.routed_experts.w2_weight"]
        assert (w13.shape, w2.shape) == ((len(mine), 2 * part, 8), (len(mine), 8, part))
        for e, name in enumerate(mine):
            assert np.array_equal(w13[e, :part], full[f"{name}.gate_proj.weight"][rows])
            assert np.array_equal(w13[e, part:], full[f"{name}.up_proj.weight"][rows])
            assert np.array_equal(w2[e], full[f"{name}.down_proj.weight"][:, rows])


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 3)])
def test_engine_layout_covers_the_trainer(config: str, tp: int, pp: int) -> None:
    engine = worker_layout(CONFIGS[config], "engine", tp=tp, pp=pp)
    check_layout(engine)
    trainer = shard_layout(model_layout(CONFIGS[config], "fsdp3"), "trainer")
    make_plan(trainer, engine)
    # What the ranks of the engine hold together is the model: as a source it lacks nothing.
    make_plan(engine, shard_layout(model_layout(CONFIGS[config], ""), "all"))


def view(layout: Layout, rank: int, index: int, memory: dict[str, Any]) -> Any:
    """One shard as a view into flat memory of float64, by storage."""
    shard = layout.ranks[rank].shards[index]
    flat, strides = memory[shard.storage], [8 * stride for stride in shard.strides]
    return np.ndarray(shard.box.size, np.float64, flat, shard.offset_bytes * 8 // 2, strides)


def test_plan_fills_fused_parameters() -> None:
    """From FSDP within tensor parallelism, strided, to fused, padded and replicated: bit for bit."""
    full = tensors_of(EXPERTS)
    trainer = shard_layout(model_layout(EXPERTS, "fsdp3 tp2"), "trainer")
    engine = worker_layout(EXPERTS, "engine", tp=4)
    sources: list[dict[str, Any]] = []
    for rank, has in enumerate(trainer.ranks):
        sizes = dict.fromkeys((shard.storage for shard in has.shards), 0)
        for shard in has.shards:
            sizes[shard.storage] += shard.box.volume
        sources.append({name: np.empty(size) for name, size in sizes.items()})
        for index, shard in enumerate(has.shards):
            box = tuple(slice(o, o + n) for o, n in zip(shard.box.offset, shard.box.size, strict=True))
            view(trainer, rank, index, sources[-1])[...] = full[trainer.tensors[shard.tensor].name][box]
    plan = make_plan(trainer, engine)
    for rank in range(4):
        parameters = worker_table(EXPERTS, rank, tp=4).parameters
        memory = {parameter.name: np.full(int(np.prod(parameter.shape)), -1.0) for parameter in parameters}
        for bucket in plan.of_destination(rank):
            for move in bucket.transfers:
                taken, put = (
                    view(layout, at, index, held)[
                        tuple(
                            slice(o - first, o - first + n)
                            for o, first, n in zip(
                                move.box.offset, layout.ranks[at].shards[index].box.offset, move.box.size, strict=True
                            )
                        )
                    ]
                    for layout, at, index, held in (
                        (trainer, bucket.source_rank, move.source_shard, sources[bucket.source_rank]),
                        (engine, rank, move.destination_shard, memory),
                    )
                )
                assert (put == -1).all()
                put[...] = taken
        for name, array in filled(EXPERTS, rank, full, tp=4).items():
            assert np.array_equal(memory[name].reshape(array.shape), array), name


def test_invalid_worker_layouts_are_refused() -> None:
    with pytest.raises(WeightsError, match="no worker 2 among 1 x 2"):
        worker_table(DENSE, 2, tp=2)
    with pytest.raises(WeightsError, match=r"vLLM cannot share .*gate_proj.weight"):
        worker_table({**DENSE, "intermediate_size": 15}, 0, tp=2)
    with pytest.raises(WeightsError, match="128 padded rows cannot be shared evenly by 3"):
        worker_table({**DENSE, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 2}, 0, tp=3)
    with pytest.raises(WeightsError, match=r"Stages of \(3,\) layers do not fit"):
        worker_table(DENSE, 0, pp=2, layers_of_stages=(3,))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(worker_table(DENSE, 0)))["tensors"]
