"""The layouts of vLLM's workers against vLLM's own model classes.

For each parallelism, one process per worker builds its part of the real class, fills it with NaN and lets vLLM load a
small checkpoint. By the table, every element must then be an element of a parameter that a policy publishes, exactly
once, or padding, which is zero. What is recorded of vLLM's loader must equal the table, shard by shard.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engines import publish_experts
from safetensors.torch import load_file
from vllm.config import VllmConfig
from vllm.model_executor.model_loader.utils import initialize_model
from workers import engine_config, in_workers

from starling.rollout.engine.vllm.cpu import do_without_torchvision
from starling.weightsync.layouts.fused import transformers_table
from starling.weightsync.layouts.parameters import in_terms_of
from starling.weightsync.layouts.strided import BoxCopy, Strided, merged
from starling.weightsync.layouts.vllm import worker_table
from starling.weightsync.plan.layout import Layout, item_bytes
from starling.weightsync.tensors.modules import layout_of
from starling.weightsync.vllm.recorded import PublishedModel, record_worker

do_without_torchvision()

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 6, "moe_intermediate_size": 24, "num_experts_per_tok": 2, "mlp_only_layers": [1]}
LATENT = {
    **TEXT,
    "num_key_value_heads": 8,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}

VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 24,
    "out_hidden_size": 64,
    "num_heads": 4,
    "patch_size": 4,
    "window_size": 16,
    "fullatt_block_indexes": [1],
}
DEEP_VISION = {**VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}

CONFIGS: dict[str, tuple[str, Any]] = {
    "llama": ("LlamaForCausalLM", transformers.LlamaConfig(**TEXT)),
    "llama tied with biases": (
        "LlamaForCausalLM",
        transformers.LlamaConfig(**TEXT, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    ),
    "qwen2": ("Qwen2ForCausalLM", transformers.Qwen2Config(**TEXT)),
    "qwen3 tied": ("Qwen3ForCausalLM", transformers.Qwen3Config(**TEXT, head_dim=16, tie_word_embeddings=True)),
    "qwen3_moe": ("Qwen3MoeForCausalLM", transformers.Qwen3MoeConfig(**TEXT, head_dim=16, **EXPERTS)),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        transformers.Qwen2_5_VLConfig(
            text_config={**TEXT, "rope_parameters": SECTIONS}, vision_config=VISION, tie_word_embeddings=False
        ),
    ),
    "qwen3_vl tied": (
        "Qwen3VLForConditionalGeneration",
        transformers.Qwen3VLConfig(
            text_config={**TEXT, "head_dim": 8, "rope_parameters": SECTIONS},
            vision_config=DEEP_VISION,
            tie_word_embeddings=True,
        ),
    ),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        transformers.Qwen2VLConfig(
            text_config={**TEXT, "rope_parameters": SECTIONS},
            vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, "num_heads": 4},
            tie_word_embeddings=False,
        ),
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration",
        transformers.Qwen3VLMoeConfig(
            text_config={**TEXT, "head_dim": 8, "rope_parameters": SECTIONS, **EXPERTS, "norm_topk_prob": True},
            vision_config=DEEP_VISION,
            tie_word_embeddings=False,
        ),
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", transformers.DeepseekV3Config(**LATENT, q_lora_rank=20)),
    "deepseek_v3 without q_lora": ("DeepseekV3ForCausalLM", transformers.DeepseekV3Config(**LATENT, q_lora_rank=None)),
}


def check_worker(rank: int, folder: Path, config: VllmConfig) -> None:
    """Build, load and check the part of one worker."""
    parallel = config.parallel_config
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    media = config.model_config.multimodal_config
    module = initialize_model(config)
    for parameter in module.parameters():
        parameter.data.fill_(float("nan"))
    module.load_weights(iter(load_file(folder / "model.safetensors").items()))
    full: dict[str, torch.Tensor] = torch.load(folder / "trained.pt")
    written = json.loads((folder / "config.json").read_text())
    table = worker_table(
        written,
        rank,
        tp=tp,
        pp=pp,
        whole_experts=parallel.enable_expert_parallel,
        whole_tower=media is not None and media.mm_encoder_tp_mode == "data",
    )
    table = in_terms_of(table, transformers_table(written))
    live = dict(module.named_parameters())
    differing = {parameter.name for parameter in table.parameters} ^ set(live)
    assert not differing, sorted(differing)
    layout = layout_of(live, "engine", table=table)
    count = {name: torch.zeros_like(parameter, dtype=torch.int32) for name, parameter in live.items()}
    for shard in layout.ranks[0].shards:
        spec = layout.tensors[shard.tensor]
        box = tuple(slice(o, o + n) for o, n in zip(shard.box.offset, shard.box.size, strict=True))
        at = (shard.box.size, shard.strides, shard.offset_bytes // 4)
        assert torch.equal(live[shard.storage].data.as_strided(*at), full[spec.name][box]), (shard.storage, spec.name)
        count[shard.storage].as_strided(*at).add_(1)
    for name, times in count.items():
        assert int(times.max()) == 1, name
        assert not live[name].data[times == 0].any(), f"{name} holds something where the table says padding"
    check_recorded(module, config, folder, layout, {name for name, times in count.items() if int(times.min()) == 0})


def check_recorded(
    module: torch.nn.Module, config: VllmConfig, folder: Path, expected: Layout, padded: set[str]
) -> None:
    """Assert that what is recorded of vLLM's own loader equals the layout by the table, shard by shard."""
    before = {name: parameter.data.clone() for name, parameter in module.named_parameters()}
    recorded = record_worker(module, config, PublishedModel.of(config), "engine")
    assert recorded.whole == ()
    assert set(recorded.padded) == padded
    assert shards_by_place(recorded.layout) == shards_by_place(expected)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter.data, before[name]), f"recording has changed {name}"


def shards_by_place(layout: Layout) -> dict[tuple[str, str], list[BoxCopy]]:
    """Return the shards of a layout of one rank by storage and tensor, adjacent ones joined."""
    found: dict[tuple[str, str], list[BoxCopy]] = {}
    for shard in layout.ranks[0].shards:
        spec = layout.tensors[shard.tensor]
        strides = tuple(stride if n > 1 else 0 for n, stride in zip(shard.box.size, shard.strides, strict=True))
        place = Strided(shard.offset_bytes // item_bytes(spec), strides)
        found.setdefault((shard.storage, spec.name), []).append(BoxCopy(shard.box, place))
    return {key: merged(copies) for key, copies in found.items()}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "tp", "pp", "whole"),
    [
        ("llama", 2, 1, False),
        ("llama tied with biases", 2, 2, False),
        ("qwen2", 4, 1, False),
        ("qwen3 tied", 1, 3, False),
        ("qwen3_moe", 2, 1, False),
        ("qwen3_moe", 2, 1, True),
        ("qwen2_vl", 2, 1, False),
        ("qwen2_5_vl", 1, 1, False),
        ("qwen3_vl tied", 2, 1, True),
        ("qwen3_vl_moe", 2, 1, False),
        ("deepseek_v3", 2, 1, True),
        ("deepseek_v3 without q_lora", 2, 1, False),
        *(
            pytest.param(*case, marks=pytest.mark.campaign)
            for case in (
                ("llama", 1, 1, False),
                ("llama", 4, 1, False),
                ("llama", 2, 2, False),
                ("qwen3 tied", 2, 1, False),
                ("qwen3_moe", 1, 1, False),
                ("qwen3_moe", 4, 1, True),
                ("qwen3_moe", 1, 2, False),
                ("qwen2_vl", 4, 1, True),
                ("qwen2_5_vl", 2, 2, False),
                ("qwen3_vl tied", 2, 2, False),
                ("qwen3_vl_moe", 2, 2, True),
                ("deepseek_v3", 2, 1, False),
            )
        ),
    ],
)
def test_worker_parameters_match_the_table(
    name: str, tp: int, pp: int, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, made = CONFIGS[name]
    torch.manual_seed(0)
    module = getattr(transformers, kind)(made)
    for tensor in module.state_dict().values():
        tensor.normal_()
    module.save_pretrained(tmp_path)
    torch.save(module.state_dict(), tmp_path / "trained.pt")
    if made.model_type == "qwen3_vl_moe":
        publish_experts(tmp_path / "model.safetensors")
    # Once, as vLLM inspects the class in a subprocess.
    whole_experts = whole and "_experts" in (tmp_path / "config.json").read_text()
    config = engine_config(tmp_path, tp, pp, whole_experts, mm_encoder_tp_mode="data" if whole else "weights")
    in_workers(check_worker, config, tmp_path, monkeypatch)
