"""Tables of model families, compared with the classes of transformers in memory and on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from starling.common.errors import WeightsError
from starling.weightsync.layouts.families import model_of
from starling.weightsync.layouts.fused import transformers_table
from starling.weightsync.layouts.parameters import Parameter, ParameterPart, Table, in_terms_of, region, whole
from starling.weightsync.layouts.presets import PRESETS
from starling.weightsync.layouts.vllm import worker_table
from starling.weightsync.plan.boxes import intersection
from starling.weightsync.plan.layout import ITEM_BYTES, Box
from starling.weightsync.tensors.modules import layout_of

TEXT: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 20,
    "max_position_embeddings": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    **TEXT,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 6,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 6,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
VISION = {"depth": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 10, "out_hidden_size": 16, "patch_size": 2}
OLD_VISION = {"depth": 1, "embed_dim": 8, "hidden_size": 16, "mlp_ratio": 2, "num_heads": 2, "patch_size": 2}
DEEP = {**VISION, "num_position_embeddings": 9, "deepstack_visual_indexes": [0]}

CASES: dict[str, tuple[str, Any]] = {
    "llama": ("LlamaForCausalLM", transformers.LlamaConfig(**TEXT, head_dim=6)),
    "llama with biases": ("LlamaForCausalLM", transformers.LlamaConfig(**TEXT, attention_bias=True, mlp_bias=True)),
    "qwen2": ("Qwen2ForCausalLM", transformers.Qwen2Config(**TEXT)),
    "qwen3 tied": ("Qwen3ForCausalLM", transformers.Qwen3Config(**TEXT, head_dim=6, tie_word_embeddings=True)),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        transformers.Qwen3MoeConfig(
            **TEXT, head_dim=6, num_experts=4, moe_intermediate_size=6, num_experts_per_tok=2, mlp_only_layers=[1]
        ),
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        transformers.Qwen2_5_VLConfig(text_config=TEXT, vision_config=VISION),
    ),
    "qwen2_5_vl tied": (
        "Qwen2_5_VLForConditionalGeneration",
        transformers.Qwen2_5_VLConfig(text_config=TEXT, vision_config=VISION, tie_word_embeddings=True),
    ),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", transformers.Qwen3VLConfig(text_config=TEXT, vision_config=DEEP)),
    "qwen3_vl tied": (
        "Qwen3VLForConditionalGeneration",
        transformers.Qwen3VLConfig(text_config={**TEXT, "head_dim": 6}, vision_config=DEEP, tie_word_embeddings=True),
    ),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        transformers.Qwen2VLConfig(text_config=TEXT, vision_config=OLD_VISION),
    ),
    "qwen2_vl tied": (
        "Qwen2VLForConditionalGeneration",
        transformers.Qwen2VLConfig(text_config=TEXT, vision_config=OLD_VISION, tie_word_embeddings=True),
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration",
        transformers.Qwen3VLMoeConfig(
            text_config={**TEXT, "head_dim": 6, "num_experts": 4, "moe_intermediate_size": 6, "mlp_only_layers": [1]},
            vision_config=DEEP,
            tie_word_embeddings=False,
        ),
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", transformers.DeepseekV3Config(**LATENT, q_lora_rank=10)),
    "deepseek_v3 without q_lora": ("DeepseekV3ForCausalLM", transformers.DeepseekV3Config(**LATENT, q_lora_rank=None)),
}


def each_expert(disk: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Take apart what a file holds of all experts of a layer in one tensor."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in disk.items():
        module, _, kind = name.rpartition(".")
        if not module.endswith(".experts"):
            found[name] = tensor
            continue
        kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        for e, expert in enumerate(tensor):
            found |= {
                f"{module}.{e}.{part}.weight": rows for part, rows in zip(kinds, expert.chunk(len(kinds)), strict=True)
            }
    return found


@pytest.mark.parametrize("case", CASES)
def test_parameters_consist_of_the_tensors_on_disk(case: str, tmp_path: Path) -> None:
    """Names, shapes and values: what each parameter's parts say is what the checkpoint's tensors hold, exactly once."""
    name, config = CASES[case]
    torch.manual_seed(3)
    module = getattr(transformers, name)(config)
    for tensor in module.state_dict().values():
        tensor.normal_()
    module.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        disk = each_expert({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118 - it is no mapping

    owned = {weight.spec.name: weight.spec for weight in model_of(written).weights if not weight.spec.same_as}
    assert {key: spec.shape for key, spec in owned.items()} == {key: tuple(t.shape) for key, t in disk.items()}
    assert {spec.dtype for spec in owned.values()} == {"float32"}

    live = module.state_dict()
    table = transformers_table(written)
    assert {p.name: p.shape for p in table.parameters} == {
        key: tuple(t.shape) for key, t in {"lm_head.weight": module.lm_head.weight, **live}.items()
    }
    layout = layout_of(live, "policy", table=table)
    times_held: dict[str, int] = dict.fromkeys(owned, 0)
    written_to = {key: torch.zeros_like(tensor) for key, tensor in live.items()}
    for shard in layout.ranks[0].shards:
        spec = layout.tensors[shard.tensor]
        view = live[shard.storage].as_strided(shard.box.size, shard.strides, shard.offset_bytes // 4)
        assert torch.equal(view, disk[spec.name]), spec.name
        written_to[shard.storage].as_strided(shard.box.size, shard.strides, shard.offset_bytes // 4).add_(1)
        times_held[spec.name] += 1
    assert set(times_held.values()) == {1}
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for key, count in written_to.items():
        assert key in tied or bool((count == 1).all()), key


@pytest.mark.parametrize("case", ["qwen3 tied", "qwen3_moe", "qwen2_5_vl", "qwen3_vl_moe", "deepseek_v3"])
@pytest.mark.parametrize(("tp", "whole_experts"), [(1, False), (2, False), (2, True)])
def test_worker_table_in_terms_of_the_trainers_parameters(case: str, tp: int, whole_experts: bool) -> None:
    """A worker takes the same elements, whether the source names published tensors or its module's parameters."""
    name, config = CASES[case]
    written = json.loads(config.to_json_string())
    trained = transformers_table(written, "float32")
    sizes = {p.name: torch.Size(p.shape) for p in trained.parameters}
    numbered = {
        key: torch.arange(size.numel()).reshape(size) + (n << 20) for n, (key, size) in enumerate(sizes.items())
    }
    published: dict[str, torch.Tensor] = {spec.name: torch.full(spec.shape, -1) for spec in trained.tensors}
    for parameter in reversed(trained.parameters):  # of tied ones the first counts
        fill(published, parameter, numbered[parameter.name], published=True)
    for rank in range(tp):
        table = worker_table(written, rank, tp=tp, whole_experts=whole_experts, dtype="float32")
        turned = in_terms_of(table, trained)
        assert {spec.name for spec in turned.tensors if not spec.same_as} == set(
            getattr(transformers, name)(config).state_dict()
        ) - ({"lm_head.weight"} if config.tie_word_embeddings else set())
        for before, after in zip(table.parameters, turned.parameters, strict=True):
            ours, theirs = torch.full(before.shape, -1), torch.full(before.shape, -1)
            fill(published, before, ours)
            fill(numbered, after, theirs)
            assert torch.equal(ours, theirs), before.name
            assert len(after.parts) <= 3, "experts of one rank lie one after the other"


def fill(tensors: dict[str, torch.Tensor], parameter: Parameter, memory: torch.Tensor, published: bool = False) -> None:
    """Copy what `parameter` is made of into its `memory`; with `published` from there."""
    for part in parameter.parts:
        at = tuple(slice(o, o + n) for o, n in zip(part.box.offset, part.box.size, strict=True))
        start = sum(o * s for o, s in zip(part.offset, memory.stride(), strict=True))
        view = memory.as_strided(part.box.size, [memory.stride(dim) for dim in part.dims], start)
        if published:
            tensors[part.tensor][at] = view
        else:
            view.copy_(tensors[part.tensor][at])


def test_parts_of_a_parameter_are_disjoint() -> None:
    for parameter in transformers_table(json.loads(CASES["qwen3_moe"][1].to_json_string())).parameters:
        regions = [region(part, len(parameter.shape)) for part in parameter.parts]
        inside = Box(offset=(0,) * len(parameter.shape), size=parameter.shape)
        assert sum(box.volume for box in regions) == inside.volume
        assert all(intersection(box, inside) == box for box in regions)


def test_stacked_parameter_fills_stacked_parameters_only() -> None:
    stack = whole("stack", (3, 4), "float32")
    rows = tuple(
        ParameterPart(tensor=f"row {n}", box=Box(offset=(0,), size=(4,)), offset=(n, 0), dims=(1,)) for n in range(3)
    )
    made = Table(tensors=(), parameters=(Parameter(name="stack", shape=(3, 4), dtype="float32", parts=rows),))
    one = ParameterPart(tensor="row 2", box=Box(offset=(0,), size=(4,)), offset=(0,), dims=(0,))
    alone = Table(tensors=(), parameters=(Parameter(name="alone", shape=(4,), dtype="float32", parts=(one,)),))
    with pytest.raises(WeightsError, match="stack stacks row 2, but the parameter that it fills does not"):
        in_terms_of(alone, made)
    assert in_terms_of(made, made).parameters == (stack,)


def test_parameters_missing_from_the_table_are_named() -> None:
    written = json.loads(CASES["llama"][1].to_json_string())
    table = transformers_table(written, "float32")
    with pytest.raises(WeightsError, match=r"Parameter model.extra.weight of policy is not in the table"):
        layout_of({"model.extra.weight": torch.zeros(2)}, "policy", table=table)
    with pytest.raises(
        WeightsError, match=r"model.norm.weight of policy is float32 of shape \(3,\), the table .*\(16,\)"
    ):
        layout_of({"model.norm.weight": torch.zeros(3)}, "policy", table=table)
    compiled = layout_of({"_orig_mod.model.norm.weight": torch.zeros(16)}, "policy", table=table)
    shard = compiled.ranks[0].shards[0]
    assert (compiled.tensors[shard.tensor].name, shard.storage) == ("model.norm.weight", "_orig_mod.model.norm.weight")


def test_copy_of_a_tied_tensor_belongs_to_its_owner() -> None:
    """The last stage of a pipeline has a head of its own, which equals the embedding of the first."""
    written = {**json.loads(CASES["qwen3 tied"][1].to_json_string())}
    layout = layout_of({"lm_head.weight": torch.zeros(20, 16)}, "policy", table=transformers_table(written, "float32"))
    (shard,) = layout.ranks[0].shards
    assert (layout.tensors[shard.tensor].name, shard.storage) == ("model.embed_tokens.weight", "lm_head.weight")


@pytest.mark.parametrize(
    ("preset", "billions"),
    [
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.55),
        ("qwen2.5-7b", 7.62),
        ("qwen3-0.6b", 0.60),
        ("qwen3-8b", 8.19),
        ("qwen3-32b", 32.76),
        ("qwen3-30b-a3b", 30.53),
        ("qwen3-235b-a22b", 235.09),
        ("deepseek-v3", 671.03),
        ("kimi-k2", 1026.41),
    ],
)
def test_presets_have_the_published_sizes(preset: str, billions: float) -> None:
    assert round(model_of(PRESETS[preset]).num_parameters / 1e9, 2) == billions


def test_invalid_configurations_are_refused() -> None:
    with pytest.raises(WeightsError, match="no table of tensors for model type 'gpt2'"):
        model_of({"model_type": "gpt2"})
    with pytest.raises(WeightsError, match="needs a number in 'vocab_size', at most 1073741824, it has None"):
        model_of({key: value for key, value in PRESETS["llama-3.1-8b"].items() if key != "vocab_size"})
    with pytest.raises(WeightsError, match="needs a number in 'hidden_size', at most 1073741824, it has '4096'"):
        model_of({**PRESETS["llama-3.1-8b"], "hidden_size": "4096"})
    with pytest.raises(WeightsError, match="Element type int4 is not supported"):
        model_of(PRESETS["llama-3.1-8b"], "int4")
    assert all(model_of(config).weights[0].spec.dtype in ITEM_BYTES for config in PRESETS.values())
