"""Layers of a vLLM worker that are filled as they were created, and then processed as after loading.

vLLM packs some weights after loading (transposed, permuted, folded) as the kernel of the device needs them, so a
version cannot be copied into the live parameters. Each such layer in turn temporarily gets the parameters that it was
created with; they are filled, vLLM packs them as after loading, and the result is copied into the memory that kernels
and CUDA graphs use.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader.reload.layerwise import _copy_and_restore_kernel_tensors, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer, restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers


@torch.no_grad()
def layer_to_fill(layer: torch.nn.Module, config: VllmConfig) -> Iterator[torch.nn.Module]:
    """Yield `layer`, once, with the parameters that it was created with, to be filled.

    Then it is processed as after loading, and the result is copied into the memory that kernels use.
    """
    info = get_layerwise_info(layer)
    info.kernel_tensors = get_layer_params_buffers(layer)
    info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
    others = {name: value for name, value in vars(layer).items() if isinstance(value, torch.Tensor)}
    restore_layer_on_meta(layer, info)
    materialize_layer(layer, info)
    bias = layer._parameters.get("bias")
    if bias is not None:  # not quantised, but some kernels permute it
        layer.bias = torch.nn.Parameter(torch.empty_like(bias), requires_grad=False)
    yield layer
    method: Any = layer.quant_method
    with set_current_vllm_config(config):
        method.process_weights_after_loading(layer)
    _copy_and_restore_kernel_tensors(layer, info)
    for name, value in others.items():  # workspaces, whose addresses are recorded in CUDA graphs
        made = getattr(layer, name, None)
        if isinstance(made, torch.Tensor) and made is not value and made.shape == value.shape:
            value.copy_(made)
            setattr(layer, name, value)
    info.reset()
