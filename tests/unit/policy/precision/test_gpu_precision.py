"""Products in FP8 on a GPU, against their emulation on the CPU (`make test-gpu`)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from starling.common.errors import ConfigError
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.precision import float8, mx
from starling.policy.train.precision.layers import use_precision

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU: not yet run here"),
]

KINDS = {
    "fp8_tensorwise": (8, 9),
    "fp8_rowwise": (8, 9),
    "fp8_rowwise_gw_hp": (8, 9),
    "mxfp8": (10, 0),
    "mxfp4": (10, 0),
}
"""With the compute capability of the first GPUs that multiply them."""


def multiplies(kind: str) -> bool:
    return torch.cuda.get_device_capability() >= KINDS[kind]


def results(model: torch.nn.Module, inputs: Tensor, gradient: Tensor) -> list[Tensor]:
    """Return output and gradients, on the CPU."""
    own = inputs.detach().requires_grad_()
    output = model(own)
    output.backward(gradient)
    assert own.grad is not None
    found = [output.detach(), own.grad, *(one.grad for one in model.parameters() if one.grad is not None)]
    return [one.cpu().float() for one in found]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_tokens", [1, 77, 256])
@pytest.mark.parametrize("bias", [False, True])
def test_products_on_a_gpu_equal_their_emulation(kind: str, dtype: torch.dtype, num_tokens: int, bias: bool) -> None:
    if not multiplies(kind):
        pytest.skip(f"the GPU does not multiply {kind}")
    replace_layers = (mx if kind.startswith("mx") else float8).replace_layers
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    emulated = torch.nn.Sequential(torch.nn.Linear(128, 224, bias=bias)).to(dtype)
    multiplied: Any = copy.deepcopy(emulated).cuda()
    replace_layers(emulated, ["0"], kind, emulate=True)
    replace_layers(multiplied, ["0"], kind, emulate=False)
    inputs, gradient = (torch.randn(1, num_tokens, size, generator=generator).to(dtype) for size in (128, 224))
    expected = results(emulated, inputs, gradient)
    found = results(multiplied, inputs.cuda(), gradient.cuda())
    # torchao rounds products of rows to bfloat16, whatever the type.
    bound = 4 * torch.finfo(torch.bfloat16).eps
    for one, other in zip(found, expected, strict=True):
        assert torch.linalg.vector_norm(one - other) <= bound * torch.linalg.vector_norm(other)


@pytest.mark.parametrize("kind", ["fp8_rowwise", "mxfp8"])
def test_gpu_that_does_not_multiply_codes_is_refused(kind: str) -> None:
    from transformers import AutoModelForCausalLM, Qwen3Config

    if multiplies(kind):
        pytest.skip(f"the GPU multiplies {kind}")
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    model = AutoModelForCausalLM.from_config(Qwen3Config(**sizes, head_dim=16, num_attention_heads=4)).cuda()
    settings = PolicySettings.model_validate({"precision": {"kind": kind}})
    with pytest.raises(ConfigError, match=rf'"{kind}" needs a GPU of compute capability [0-9.]+, and cuda:0 has'):
        use_precision(model, settings)
