"""Small models and random groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from vocabulary import VOCABULARY

from starling.common.wire.messages import ScorerScores
from starling.policy.train.data.groups import ScoredGroup


def _tiny(kind: str = "qwen3", *, tied: bool = True, seed: int = 0, **changes: Any) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

    configs = {"qwen3": Qwen3Config, "qwen3_moe": Qwen3MoeConfig, "qwen2": Qwen2Config, "llama": LlamaConfig}
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "initializer_range": 0.2,
    } | changes
    if kind == "qwen2":
        del settings["head_dim"]
    if kind == "qwen3_moe":
        settings |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(configs[kind](**settings)).eval()


@pytest.fixture
def tiny() -> Callable[..., Any]:
    """Make a model of a few thousand parameters."""
    torch.set_num_threads(1)
    return _tiny


@pytest.fixture
def make_groups() -> Callable[..., list[ScoredGroup]]:
    """Make random groups with the given lengths of prompts and completions."""

    def make(shapes: Sequence[tuple[int, Sequence[int]]], *, seed: int = 0, version: int = 0) -> list[ScoredGroup]:
        generator, of_scores = np.random.default_rng(seed), np.random.default_rng((seed, 1))

        def scored(label: str, weight: float, num: int) -> ScorerScores:
            return ScorerScores(label=label, weight=weight, values=tuple(of_scores.standard_normal(num).tolist()))

        return [
            ScoredGroup(
                prompt_ids=generator.integers(VOCABULARY, size=prompt).astype(np.int32),
                completion_ids=generator.integers(VOCABULARY, size=sum(lengths)).astype(np.int32),
                logprobs=(-3.4 + 0.4 * generator.standard_normal(sum(lengths))).astype(np.float32),
                versions=np.full(sum(lengths), version, dtype=np.int32),
                lengths=tuple(lengths),
                rewards=tuple(generator.standard_normal(len(lengths)).tolist()),
                prompt_id=f"train/0/{index}",
                scores=(scored("right", 1.0, len(lengths)), scored("short", 0.5, len(lengths))),
            )
            for index, (prompt, lengths) in enumerate(shapes)
        ]

    return make
