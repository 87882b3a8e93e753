"""Models that are loaded with cheap outlines: every parameter and buffer as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from starling.algo.outline import cheap_outlines

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 11,
    "max_position_embeddings": 64,
}
LONGROPE = {"rope_type": "longrope", "long_factor": [2.0] * 4, "short_factor": [1.0] * 4, "rope_theta": 1e4}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}),
    ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32, "pad_token_id": 0}),
    ("gemma2", {}),
    ("qwen3_moe", {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}),
    ("gpt2", {"n_embd": 16, "n_head": 2, "n_layer": 1}),
]


@pytest.mark.parametrize(("kind", "fields"), MODELS)
def test_model_is_the_same(kind: str, fields: dict[str, Any], tmp_path: Path) -> None:
    config = AutoConfig.for_model(kind, **SIZES, **fields)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    with cheap_outlines():
        lean = AutoModelForCausalLM.from_pretrained(tmp_path)
    for of_plain, of_lean in (
        (dict(plain.named_parameters()), dict(lean.named_parameters())),
        (dict(plain.named_buffers()), dict(lean.named_buffers())),
    ):
        assert list(of_plain) == list(of_lean)
        for name, tensor in of_plain.items():
            assert torch.equal(tensor, of_lean[name]), name
            assert tensor.dtype == of_lean[name].dtype, name


def test_functions_with_values_are_as_without() -> None:
    with cheap_outlines():
        weight = torch.nn.init.constant_(torch.empty(3), 2.0)
        angles = 1.0 / (10.0 ** (torch.arange(0, 3, dtype=torch.float) / 3))
        like = torch.empty_like(weight, dtype=torch.int64)
    assert weight.tolist() == [2.0] * 3
    assert torch.equal(angles, 1.0 / (10.0 ** (torch.arange(0, 3, dtype=torch.float) / 3)))
    assert (like.shape, like.dtype, like.device.type) == ((3,), torch.int64, "cpu")


def test_outlines_have_the_types_and_shapes_that_they_have_without() -> None:
    def make() -> list[torch.Tensor]:
        with torch.device("meta"):
            steps = torch.arange(0, 6, 2, dtype=torch.int64)
            return [steps, steps / 3, 2.0**steps, torch.ones(2, 1) / steps, torch.empty_like(steps, dtype=torch.half)]

    with cheap_outlines():
        lean = make()
    assert [(one.shape, one.dtype, one.device) for one in lean] == [
        (one.shape, one.dtype, one.device) for one in make()
    ]
