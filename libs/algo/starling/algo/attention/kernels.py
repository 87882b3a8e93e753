"""Fused attention kernels of torch that return the log-sum-exp of the scores, and their backward passes.

Shapes: query [B, H, Q, D], key and value [B, H, K, D], output [B, H, Q, D], log-sum-exp [B, H, Q]. The backward passes
take any output and log-sum-exp: those of the attention to more keys than the call's give the gradient of that
attention.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from starling.common.errors import ConfigError

Inputs = tuple[Tensor, Tensor, Tensor]
"""Query, key and value, or the gradients of these."""
Outputs = tuple[Tensor, Tensor]
"""Output and log-sum-exp."""
_aten: Any = torch.ops.aten
FLASH_HEAD_DIM = 256
"""Largest head dimension of the flash kernels of CUDA."""


class Kernel(Protocol):
    """A fused attention."""

    @property
    def takes_bias(self) -> bool:
        """Whether it can hide keys by a bias."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *, causal: bool, scale: float
    ) -> Outputs:
        """Return output and log-sum-exp."""

    def backward(
        self, gradient: Tensor, inputs: Inputs, outputs: Outputs, bias: Tensor | None, *, causal: bool, scale: float
    ) -> Inputs:
        """Return the gradients of query, key and value, from that of the output."""


class _Cpu:
    takes_bias = True

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *, causal: bool, scale: float
    ) -> Outputs:
        found: Outputs = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=bias, scale=scale
        )
        return found

    def backward(
        self, gradient: Tensor, inputs: Inputs, outputs: Outputs, bias: Tensor | None, *, causal: bool, scale: float
    ) -> Inputs:
        found: Inputs = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, *inputs, *outputs, 0.0, causal, attn_mask=bias, scale=scale
        )
        return found


class _CudaFlash:
    """Half precision."""

    takes_bias = False

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *, causal: bool, scale: float
    ) -> Outputs:
        output, logsumexp, *_ = _aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, False, scale=scale
        )
        return output, logsumexp

    def backward(
        self, gradient: Tensor, inputs: Inputs, outputs: Outputs, bias: Tensor | None, *, causal: bool, scale: float
    ) -> Inputs:
        query, key, _ = inputs
        output, logsumexp = outputs
        empty = torch.empty(0, dtype=torch.int64, device=query.device)
        seed = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of a dropout of 0
        found: Inputs = _aten._scaled_dot_product_flash_attention_backward(
            gradient,
            *inputs,
            output,
            logsumexp.contiguous(),
            None,
            None,
            query.shape[2],
            key.shape[2],
            0.0,
            causal,
            seed,
            empty,
            scale=scale,
        )
        return found


class _CudaEfficient:
    """Single precision, and head dimensions that flash attention cannot take."""

    takes_bias = False

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *, causal: bool, scale: float
    ) -> Outputs:
        output, logsumexp, *_ = _aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, causal, scale=scale
        )
        return output, logsumexp[:, :, : query.shape[2]]

    def backward(
        self, gradient: Tensor, inputs: Inputs, outputs: Outputs, bias: Tensor | None, *, causal: bool, scale: float
    ) -> Inputs:
        output, logsumexp = outputs
        # The kernel reads blocks of 32 queries.
        padded = torch.nn.functional.pad(logsumexp, (0, -logsumexp.shape[2] % 32), value=torch.inf)
        seed = torch.zeros((), dtype=torch.int64, device=gradient.device)
        *found, _ = _aten._scaled_dot_product_efficient_attention_backward(
            gradient,
            *inputs,
            None,
            output,
            padded,
            seed,
            seed,
            0.0,
            [True, True, True, False],
            causal,
            scale=scale,
        )
        return found[0], found[1], found[2]


_CPU, _FLASH, _EFFICIENT = _Cpu(), _CudaFlash(), _CudaEfficient()


def kernel_for(query: Tensor) -> Kernel:
    """Return the kernel for tensors like `query`, [..., D].

    Raises:
        ConfigError: there is none for its device and type.
    """
    device, dtype = query.device.type, query.dtype
    if device == "cpu":
        return _CPU
    if device == "cuda" and dtype in (torch.float16, torch.bfloat16) and query.shape[-1] <= FLASH_HEAD_DIM:
        return _FLASH
    if device == "cuda" and dtype != torch.float64:
        return _EFFICIENT
    raise ConfigError(
        f"there is no fused attention for {str(dtype).removeprefix('torch.')} on {device}: set model.dtype to bfloat16 "
        "or float32, and model.device to cpu or cuda"
    )
