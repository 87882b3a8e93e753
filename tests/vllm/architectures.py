"""Tiny random models of the architectures of the installed vLLM for which there is no table of ours.

`docs/reference/architectures.md` lists them, and those that vLLM's build for CPUs cannot compute.
"""

from __future__ import annotations

from typing import Any

from tiny_sizes import CONTEXT, GROUPED, PLAIN, SMALL, WIDE

EXPERTS: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
SHARED_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
"""Routed experts beside a shared one, below a dense layer."""

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "afmoe": {
        **GROUPED,
        **EXPERTS,
        "moe_intermediate_size": 32,
        "num_dense_layers": 1,
        "num_shared_experts": 1,
        "sliding_window": 32,
        "score_func": "sigmoid",
        "route_norm": True,
        "route_scale": 1.0,
        "n_group": 1,
        "topk_group": 1,
    },
    "arcee": GROUPED,
    "cohere": {**PLAIN, "num_key_value_heads": 2},
    "cohere2": {**GROUPED, "sliding_window": 32},
    "dots1": {**GROUPED, **SHARED_EXPERTS},
    "ernie4_5": GROUPED,
    "ernie4_5_moe": {
        **GROUPED,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "exaone4": {**GROUPED, "sliding_window": 32, "sliding_window_pattern": 2},
    "falcon": {
        **SMALL,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "bias": False,
        "alibi": False,
    },
    "falcon_h1": {
        **GROUPED,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_ssm": 128,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
    },
    "flex_olmo": {**GROUPED, **EXPERTS},
    "gemma": GROUPED,
    "gemma3_text": {**GROUPED, "sliding_window": 32, "query_pre_attn_scalar": 32},
    "glm": GROUPED,
    "glm4": GROUPED,
    "glm4_moe": {**GROUPED, **SHARED_EXPERTS},
    "gpt2": {**SMALL, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT},
    "gpt_bigcode": {**SMALL, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT},
    "gpt_neox": {**PLAIN, "rotary_pct": 0.5},
    "gpt_oss": {**GROUPED, **EXPERTS, "intermediate_size": 64, "sliding_window": 32},
    "gptj": {
        **SMALL,
        "n_embd": 128,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": CONTEXT,
        "rotary_dim": 16,
        "tie_word_embeddings": False,
    },
    "granite": GROUPED,
    "granitemoe": {**WIDE, **EXPERTS},
    "granitemoehybrid": {
        **WIDE,
        **EXPERTS,
        "hidden_size": 128,
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "shared_intermediate_size": 64,
    },
    "granitemoeshared": {**WIDE, **EXPERTS, "shared_intermediate_size": 64},
    "hunyuan_v1_dense": GROUPED,
    "hunyuan_v1_moe": {**GROUPED, "num_experts": 4, "moe_topk": 2, "moe_intermediate_size": 96},
    "llama4_text": {
        **GROUPED,
        **EXPERTS,
        "intermediate_size_mlp": 96,
        "interleave_moe_layer_step": 2,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 128,
    },
    "ministral": {**GROUPED, "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]},
    "mistral": {**GROUPED, "sliding_window": 32},
    "mixtral": {**GROUPED, **EXPERTS},
    "nemotron": GROUPED,
    "olmo": {**PLAIN, "num_key_value_heads": 2},
    "olmo2": {**PLAIN, "num_key_value_heads": 2},
    "olmo3": {**PLAIN, "num_key_value_heads": 2, "sliding_window": 32},
    "olmoe": {**PLAIN, "num_key_value_heads": 2, **EXPERTS},
    "opt": {
        **SMALL,
        "hidden_size": 128,
        "ffn_dim": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 128,
    },
    "persimmon": PLAIN,
    "phi3": {**PLAIN, "num_key_value_heads": 2},
    "qwen2_moe": {
        **PLAIN,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "seed_oss": GROUPED,
    "smollm3": GROUPED,
    "stablelm": {**PLAIN, "num_key_value_heads": 2},
    "starcoder2": {**PLAIN, "num_key_value_heads": 2, "sliding_window": 32},
}
"""By model type, their configurations."""

OTHER_NUMERICS: dict[str, dict[str, Any]] = {
    "apertus": GROUPED,
    "bloom": {**SMALL, "hidden_size": 128, "n_layer": 2, "n_head": 4},
    "deepseek_v2": {
        **PLAIN,
        **SHARED_EXPERTS,
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "head_dim": 64,
        "topk_method": "greedy",
    },
    "gemma2": {**GROUPED, "sliding_window": 32, "query_pre_attn_scalar": 32},
    "nemotron_h": {
        **GROUPED,
        "layers_block_type": ["mamba", "attention", "mlp"],
        "hybrid_override_pattern": "M*-",
        "num_hidden_layers": 3,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 1,
    },
    "zamba2": {
        **WIDE,
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "mamba_d_state": 16,
        "n_mamba_heads": 4,
        "mamba_headdim": 64,
        "mamba_ngroups": 1,
        "num_mem_blocks": 1,
        "attention_head_dim": 64,
        "num_key_value_heads": 4,
    },
}
"""Those that vLLM's build for CPUs computes otherwise than transformers, from the same files, by more than 1e-4."""

BFLOAT16_ONLY: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        **WIDE,
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
}
"""Those that vLLM's build for CPUs computes in bfloat16 only."""

COMPUTED = {
    "apertus",
    "falcon_h1",
    "granitemoehybrid",
    "nemotron_h",
    "qwen3_next",
    "zamba2",
}
"""Those with modules whose parameters vLLM's loader computes."""

UNRECORDED: dict[str, dict[str, Any]] = {"phi": PLAIN}
"""Those that can be served, and not trained: vLLM makes a parameter only when it loads it."""

QUICK = (
    "falcon",
    "gemma3_text",
    "gpt2",
    "gpt_oss",
    "granitemoehybrid",
    "llama4_text",
    "phi3",
    "qwen2_moe",
)
"""Those that `make test` covers, each with another kind of loading: matrices of several in one, transposed ones, other
norms, experts of four kinds, and a state-space model. All are in the campaign."""

ON_TWO_WORKERS = (
    *QUICK,
    "afmoe",
    "cohere2",
    "dots1",
    "ernie4_5_moe",
    "falcon_h1",
    "glm4",
    "glm4_moe",
    "granite",
    "mistral",
    "mixtral",
    "nemotron",
    "olmo2",
    "olmoe",
    "opt",
    "persimmon",
    "stablelm",
    "starcoder2",
    "flex_olmo",
    "exaone4",
)
"""Those that two workers divide, all but one in the campaign only."""
