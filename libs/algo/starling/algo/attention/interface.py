"""Attention of a packed row by any of the backends."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from starling.algo.attention.forest import Forest
from starling.algo.attention.kernels import FLASH_HEAD_DIM, Inputs
from starling.algo.attention.segments import segment_attention
from starling.algo.attention.short import is_short, short_attention
from starling.algo.attention.varlen import supports_varlen, varlen_attention
from starling.common.errors import ConfigError

Backend = Literal["segments", "flex", "varlen"]
"""Kernels on parts of the row, on every device; FlexAttention; variable-length flash attention."""
BackendChoice = Literal["auto", "segments", "flex", "varlen"]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    structure: Forest,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: Backend = "segments",
) -> Tensor:
    """Return the attention of a packed row, as if each sequence of its forest were alone.

    Args:
        query: [T, H, D], T tokens and H heads.
        key: [T, G, D]; each key head serves H / G query heads.
        value: [T, G, E].
        structure: which tokens attend to which.
        scale: factor of the scores.
        window: tokens of a sequence that each token sees, itself included; None for all up to itself.
        softcap: bound c of the scores, which become ``c * tanh(score / c)``; None for none.
        sinks: score of one more key for each query head, with a value of zero, [H]; None for none.
        backend: of the computation; soft caps are computed by `flex` and `segments` only, with `varlen` by the latter.

    Returns:
        [T, H, E].

    Raises:
        ConfigError: the device has no kernel for tensors of this type.
    """
    assert len(query) == structure.num_tokens, "the structure is that of another row"
    size, inputs = value.shape[-1], kernel_inputs(query, key, value)
    if backend == "varlen" and softcap is None:
        output = varlen_attention(inputs, structure, scale, window=window, sinks=sinks)
    elif backend == "flex":
        from starling.algo.attention.flex import forest_flex_attention  # Importing it for others takes seconds.

        output = forest_flex_attention(inputs, structure, scale, window=window, softcap=softcap, sinks=sinks)
    elif softcap is None and sinks is None and query.device.type == "cpu" and is_short(structure):
        output = short_attention(inputs, structure, scale, window=window)
    else:
        output = segment_attention(inputs, structure, scale, window=window, softcap=softcap, sinks=sinks)
    return output[..., :size]


def backends_for(
    choice: BackendChoice, device: torch.device, dtype: torch.dtype, head_dim: int, *, softcap: float | None
) -> tuple[Backend, ...]:
    """Return the backends to try for a model, the preferred one first.

    Args:
        choice: the setting ``policy.attention``.
        device: of the model.
        dtype: of the model.
        head_dim: of its attention, 0 if unknown.
        softcap: of its attention.

    Raises:
        ConfigError: the device does not have the chosen backend, or this does not compute the model.
    """
    fast = supports_varlen(device, dtype, head_dim)
    name = str(dtype).removeprefix("torch.")
    if choice == "auto":
        if device.type == "cuda" and softcap is not None:
            return "flex", "segments"
        return ("varlen", "segments") if fast and softcap is None else ("segments",)
    if choice == "flex" and device.type != "cuda":
        raise ConfigError(
            f"policy.attention = 'flex' has no backward pass on {device.type}: set it to 'auto' or 'segments'"
        )
    if choice == "varlen" and device.type == "cuda" and not fast:
        raise ConfigError(
            f"policy.attention = 'varlen' has no kernel for {name} and heads of {head_dim}, only for half precision "
            f"and heads of up to {FLASH_HEAD_DIM}: set model.dtype to 'bfloat16', or policy.attention to 'auto'"
        )
    if choice == "varlen" and softcap is not None:
        raise ConfigError(
            "policy.attention = 'varlen' has no soft caps, which the model's attention has: set it to 'auto'"
        )
    return (choice,)


def kernel_inputs(query: Tensor, key: Tensor, value: Tensor) -> Inputs:
    """Return the arguments as kernels take them: of one type, and with zeros up to one head dimension."""
    wide = max(query.shape[-1], value.shape[-1])
    if query.device.type == "cuda" and query.dtype in (torch.float16, torch.bfloat16):
        wide += -wide % 8  # The flash kernels have head dimensions of whole 16 bytes.
    return _widened(query, wide), _widened(key.to(query.dtype), wide), _widened(value.to(query.dtype), wide)


def _widened(rows: Tensor, size: int) -> Tensor:
    """Return `rows` with zeros up to the one head dimension of the kernels."""
    return torch.nn.functional.pad(rows, (0, size - rows.shape[-1])) if rows.shape[-1] < size else rows
