"""The arithmetic of vLLM's workers against vLLM's own model classes.

For each parallelism as many processes as it has workers build the real class, each its part, fill it with NaN and let
vLLM load a small checkpoint. Every element must then be what the table says: the canonical element of its box, exactly
once, or padding, which is zero.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.update(
    GLOO_SOCKET_IFNAME="lo",
    HF_HUB_OFFLINE="1",
    TORCH_COMPILE_DISABLE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)

import pytest
import torch
import transformers
from safetensors.torch import load_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model

from starling.rollout.engine.vllm.cpu import do_without_torchvision
from starling.weightsync.layouts.modules import layout_of
from starling.weightsync.layouts.vllm import worker_table

DEADLINE_S = 120

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
            vision_config={**VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
            tie_word_embeddings=True,
        ),
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", transformers.DeepseekV3Config(**LATENT, q_lora_rank=20)),
    "deepseek_v3 without q_lora": ("DeepseekV3ForCausalLM", transformers.DeepseekV3Config(**LATENT, q_lora_rank=None)),
}


def engine_config(folder: Path, tp: int, pp: int, whole_experts: bool) -> VllmConfig:
    return EngineArgs(
        model=str(folder),
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        enable_expert_parallel=whole_experts,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=32,
        distributed_executor_backend="mp",
    ).create_engine_config()


def check_worker(rank: int, tp: int, pp: int, whole_experts: bool, folder: Path, config: VllmConfig) -> None:
    """Build, load and compare the part of one worker."""
    with set_current_vllm_config(config):
        init_distributed_environment(tp * pp, rank, f"file://{folder}/meeting", 0, "gloo")
        initialize_model_parallel(tp, pp)
        torch.set_default_dtype(torch.float32)
        module = initialize_model(config)
        for parameter in module.parameters():
            parameter.data.fill_(float("nan"))
        full = load_file(folder / "model.safetensors")
        module.load_weights(iter(full.items()))
    written = json.loads((folder / "config.json").read_text())
    table = worker_table(written, rank, tp=tp, pp=pp, whole_experts=whole_experts)
    live = dict(module.named_parameters())
    assert {parameter.name for parameter in table.parameters} == set(live)
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


def run_worker(
    rank: int, tp: int, pp: int, whole_experts: bool, folder: Path, config: VllmConfig, answer: Connection
) -> None:
    try:
        check_worker(rank, tp, pp, whole_experts, folder, config)
        answer.send("")
    except BaseException:  # noqa: BLE001 - all that went wrong is for the parent to show
        answer.send(traceback.format_exc())
    finally:
        answer.close()
        os._exit(0)  # what the groups left running must not hold the process


@pytest.mark.parametrize(
    ("name", "tp", "pp", "whole_experts"),
    [
        ("llama", 1, 1, False),
        ("llama", 2, 1, False),
        ("llama", 4, 1, False),
        ("llama", 2, 2, False),
        ("llama tied with biases", 2, 2, False),
        ("qwen2", 4, 1, False),
        ("qwen3 tied", 2, 1, False),
        ("qwen3 tied", 1, 3, False),
        ("qwen3_moe", 1, 1, False),
        ("qwen3_moe", 2, 1, False),
        ("qwen3_moe", 2, 1, True),
        ("qwen3_moe", 4, 1, True),
        ("qwen2_5_vl", 1, 1, False),
        ("qwen2_5_vl", 2, 1, False),
        ("qwen3_vl tied", 1, 1, False),
        ("qwen3_vl tied", 2, 1, False),
        ("deepseek_v3", 2, 1, False),
        ("deepseek_v3", 2, 1, True),
        ("deepseek_v3 without q_lora", 2, 1, False),
    ],
)
def test_workers_hold_what_the_table_says(
    name: str, tp: int, pp: int, whole_experts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, made = CONFIGS[name]
    torch.manual_seed(0)
    module = getattr(transformers, kind)(made)
    for tensor in module.state_dict().values():
        tensor.normal_()
    module.save_pretrained(tmp_path)
    group = f"starling-test-{os.getpid()}-{tmp_path.name}"
    monkeypatch.setenv("VLLM_DIST_IDENT", group)
    config = engine_config(tmp_path, tp, pp, whole_experts)  # once, as it asks a process of its own about the class
    context = multiprocessing.get_context("fork")
    workers = []
    for rank in range(tp * pp):
        mine, theirs = context.Pipe(duplex=False)
        arguments = (rank, tp, pp, whole_experts, tmp_path, config, theirs)
        worker = context.Process(target=run_worker, args=arguments, daemon=True)
        worker.start()
        theirs.close()
        workers.append((worker, mine))
    try:
        for rank, (_, answer) in enumerate(workers):
            assert answer.poll(DEADLINE_S), f"worker {rank} said nothing for {DEADLINE_S} s"
            assert answer.recv() == ""
    finally:
        for worker, answer in workers:
            worker.kill()
            worker.join()
            answer.close()
        for left in Path("/dev/shm").glob(f"{group}-*"):  # vLLM does not remove them
            left.unlink()
