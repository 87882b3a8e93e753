"""Attention by segments on a GPU, against the same on the CPU in double precision (`make test-gpu`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from starling.algo.attention.forest import Forest
from starling.algo.attention.interface import Backend, BackendChoice, attention
from starling.policy.train.model.layout import AttentionPlan, attention_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU: not yet run here"),
]

FORESTS = {
    "documents": Forest.of_documents([700, 3, 64, 1, 129]),
    "group": Forest((300, *range(1, 17)), (-1, *[0] * 16)),
    "tree": Forest((200, 170, 3, 2, 90, 110), (-1, 0, 1, 1, 0, -1)),
}


def results(inputs: list[Tensor], forest: Forest, window: int | None, **arguments: Any) -> list[Tensor]:
    """Return output and gradients, in double precision on the CPU."""
    own = [one.detach().requires_grad_() for one in inputs]
    output = attention(own[0], own[1], own[2], forest, 0.2, window=window, **arguments)
    weights = torch.linspace(-1.0, 1.0, output.numel(), dtype=torch.float64).view_as(output).to(output)
    return [one.detach().cpu().double() for one in (output, *torch.autograd.grad(output, own, weights))]


@pytest.mark.parametrize("name", FORESTS)
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("segments", torch.bfloat16),
        ("segments", torch.float32),
        ("flex", torch.bfloat16),
        ("flex", torch.float32),
        ("varlen", torch.bfloat16),
    ],
)
@pytest.mark.parametrize("sizes", [(4, 4, 64), (6, 2, 128), (3, 3, 32), (4, 2, 20)])
def test_backends_on_a_gpu_equal_segments_on_the_cpu(
    name: str, window: int | None, backend: Backend, dtype: torch.dtype, sizes: tuple[int, int, int]
) -> None:
    forest, (heads, key_heads, size) = FORESTS[name], sizes
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(forest.num_tokens, count, size, generator=generator).to(dtype)
        for count in (heads, key_heads, key_heads)
    ]
    found = results([one.cuda() for one in inputs], forest, window, backend=backend)
    expected = results([one.double() for one in inputs], forest, window)
    bound = 8 * torch.finfo(dtype).eps
    for one, other in zip(found, expected, strict=True):
        assert torch.linalg.vector_norm(one - other) <= bound * torch.linalg.vector_norm(other)


@pytest.mark.parametrize("backend", ["segments", "flex"])
@pytest.mark.parametrize("window", [None, 33])
def test_soft_caps_on_a_gpu_equal_those_of_the_cpu(backend: Backend, window: int | None) -> None:
    forest, generator = FORESTS["tree"], torch.Generator().manual_seed(0)
    inputs = [torch.randn(forest.num_tokens, count, 64, generator=generator).bfloat16() for count in (6, 2, 2)]
    found = results([one.cuda() for one in inputs], forest, window, softcap=2.0, backend=backend)
    expected = results([one.double() for one in inputs], forest, window, softcap=2.0)
    for one, other in zip(found, expected, strict=True):
        assert torch.linalg.vector_norm(one - other) <= 8 * torch.finfo(torch.bfloat16).eps * torch.linalg.vector_norm(
            other
        )


@pytest.mark.parametrize("backend", ["segments", "flex", "varlen"])
def test_sinks_on_a_gpu_equal_those_of_the_cpu(backend: Backend) -> None:
    forest, generator = FORESTS["tree"], torch.Generator().manual_seed(0)
    inputs = [torch.randn(forest.num_tokens, count, 64, generator=generator).bfloat16() for count in (6, 2, 2)]
    sinks = torch.linspace(-1.0, 2.0, 6)
    found = results([one.cuda() for one in inputs], forest, None, sinks=sinks.cuda(), backend=backend)
    expected = results([one.double() for one in inputs], forest, None, sinks=sinks.double())
    for one, other in zip(found, expected, strict=True):
        assert torch.linalg.vector_norm(one - other) <= 8 * torch.finfo(torch.bfloat16).eps * torch.linalg.vector_norm(
            other
        )


@pytest.mark.parametrize(
    ("dtype", "choice", "expected"),
    [
        (torch.bfloat16, "auto", "varlen"),
        (torch.bfloat16, "flex", "flex"),
        (torch.float32, "auto", "segments"),
    ],
)
def test_model_on_a_gpu_takes_a_forest(dtype: torch.dtype, choice: BackendChoice, expected: Backend) -> None:
    sizes: dict[str, Any] = {"vocab_size": 509, "hidden_size": 192, "num_hidden_layers": 5, "num_attention_heads": 6}
    config = Qwen3Config(**sizes, num_key_value_heads=3, head_dim=32, intermediate_size=256)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().cuda()
    assert attention_plan(model, choice) == AttentionPlan("forest", expected)
