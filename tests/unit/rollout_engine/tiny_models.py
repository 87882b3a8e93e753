"""Tiny random models of several families, and reference log-probabilities by a plain forward pass."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from starling.common.wire.messages import Sampling
from starling.rollout.engine.base import GroupFailed, GroupRequest, GroupResult
from starling.rollout.engine.embedded.engine import TransformersEngine

torch.set_num_threads(1)

VOCAB = 40
CONTEXT = 64
# Wide initial weights: attention and positions then decide the logits, and an error in either shows.
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GROUPED: dict[str, Any] = {
    **COMMON,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {**GROUPED, "tie_word_embeddings": True}),
    "qwen3_untied": ("qwen3", {**GROUPED, "tie_word_embeddings": False}),
    "llama": ("llama", GROUPED),
    "qwen2": ("qwen2", GROUPED),
    "qwen2_mixed_sliding": (
        "qwen2",
        {**GROUPED, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "mistral_all_sliding": ("mistral", {**GROUPED, "sliding_window": 5}),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **COMMON,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 6,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "gpt2": (
        "gpt2",
        {**COMMON, "n_embd": 32, "n_layer": 2, "n_head": 4},
    ),
}


@functools.cache
def _weights(family: str, seed: int) -> tuple[Any, dict[str, torch.Tensor]]:
    kind, settings = FAMILIES[family]
    config = AutoConfig.for_model(kind, **settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    return config, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def make_model(family: str = "qwen3", seed: int = 0) -> Any:
    """Return a new model with the weights of `family` and `seed`."""
    kind, settings = FAMILIES[family]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))
    model.load_state_dict(_weights(family, seed)[1])
    return model.eval().requires_grad_(False)


def make_engine(model: Any = None, **settings: Any) -> TransformersEngine:
    """Return an engine over `model`, or over a tiny Qwen3."""
    return TransformersEngine(
        make_model() if model is None else model, **{"eos_token_ids": (), "max_rows": 16, **settings}
    )


def request(lease: str, prompt: list[int], count: int = 1, **sampling: Any) -> GroupRequest:
    """Write a request; `sampling` are the fields of `Sampling`."""
    return GroupRequest(lease, prompt, count, Sampling(**{"max_tokens": 8, **sampling}))


def random_prompt(seed: int, length: int) -> list[int]:
    """Return `length` token ids."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB, length)]


def drain(engine: TransformersEngine, max_steps: int = 500) -> dict[str, GroupResult]:
    """Step until the engine is empty; return the results by lease."""
    results: dict[str, GroupResult] = {}
    for _ in range(max_steps):
        if not engine.num_running and not engine.num_waiting:
            return results
        for ended in engine.step():
            assert not isinstance(ended, GroupFailed), ended.reason
            results[ended.lease] = ended
    raise AssertionError(f"not done after {max_steps} steps")


def reference_logprobs(model: Any, prompt: list[int], token_ids: Any, temperature: float = 1.0) -> np.ndarray[Any, Any]:
    """Return the log-probabilities of `token_ids` after `prompt`, by one forward pass over the whole sequence."""
    tokens = [int(token) for token in token_ids]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0]
    logprobs = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    at = torch.arange(len(tokens)) + len(prompt) - 1
    return logprobs[at, torch.tensor(tokens)].numpy()
