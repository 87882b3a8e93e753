"""Attention by segments on a GPU, against the same on the CPU in double precision (`make test-gpu`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from starling.algo.attention.forest import Forest
from starling.algo.attention.interface import attention
from starling.policy.train.model.attention import layout_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU: not yet run here"),
]

FORESTS = {
    "documents": Forest.of_documents([700, 3, 64, 1, 129]),
    "group": Forest((300, *range(1, 17)), (-1, *[0] * 16)),
    "tree": Forest((200, 170, 3, 2, 90, 110), (-1, 0, 1, 1, 0, -1)),
}


def results(inputs: list[Tensor], forest: Forest, window: int | None) -> list[Tensor]:
    """Return output and gradients, in double precision on the CPU."""
    own = [one.detach().requires_grad_() for one in inputs]
    output = attention(own[0], own[1], own[2], forest, 0.2, window=window)
    weights = torch.linspace(-1.0, 1.0, output.numel(), dtype=torch.float64).view_as(output).to(output)
    return [one.detach().cpu().double() for one in (output, *torch.autograd.grad(output, own, weights))]


@pytest.mark.parametrize("name", FORESTS)
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [(4, 4, 64), (6, 2, 128), (3, 3, 32)])
def test_segments_on_a_gpu_equal_those_of_the_cpu(
    name: str, window: int | None, dtype: torch.dtype, sizes: tuple[int, int, int]
) -> None:
    forest, (heads, key_heads, size) = FORESTS[name], sizes
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(forest.num_tokens, count, size, generator=generator).to(dtype)
        for count in (heads, key_heads, key_heads)
    ]
    found = results([one.cuda() for one in inputs], forest, window)
    expected = results([one.double() for one in inputs], forest, window)
    bound = 8 * torch.finfo(dtype).eps
    for one, other in zip(found, expected, strict=True):
        assert torch.linalg.vector_norm(one - other) <= bound * torch.linalg.vector_norm(other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_model_on_a_gpu_takes_a_forest(dtype: torch.dtype) -> None:
    sizes: dict[str, Any] = {"vocab_size": 509, "hidden_size": 192, "num_hidden_layers": 5, "num_attention_heads": 6}
    config = Qwen3Config(**sizes, num_key_value_heads=3, head_dim=32, intermediate_size=256)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().cuda()
    assert layout_of(model) == "forest"
