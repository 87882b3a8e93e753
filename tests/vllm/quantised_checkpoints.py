"""Checkpoints quantised by torchao, and their dequantised weights."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from torchao.quantization.granularity import PerBlock, PerRow
from torchao.quantization.quantize_.workflows.float8.float8_tensor import Float8Tensor

from starling.rollout.engine.vllm.quantised import VLLM_FORMATS, recipe_of
from starling.weightsync.plan.layout import TensorSpec
from starling.weightsync.quantise.layouts import quantisation_of
from starling.weightsync.quantise.spec import QuantSpec
from starling.weightsync.tensors.quantise import Quantised, dequantise


def torchao_parts(form: str, tensor: torch.Tensor, amax: torch.Tensor) -> list[torch.Tensor]:
    """Return codes, scales, and any scale of the tensor by torchao; `amax` is that of all tensors with this scale."""
    if form.startswith("fp8"):
        made = Float8Tensor.from_hp(tensor, granularity=PerRow() if form == "fp8_row" else PerBlock([128, 128]))
        return [made.qdata, made.scale]
    if form == "nvfp4":
        total = per_tensor_amax_to_scale(amax)
        packed = NVFP4Tensor.to_nvfp4(tensor, per_tensor_scale=total)
        return [packed.qdata, packed.scale, total]
    element = torch.float8_e4m3fn if form == "mxfp8" else torch.float4_e2m1fn_x2
    scales, codes = to_mx(tensor, element, 32, ScaleCalculationMode.FLOOR)
    return [codes.view(torch.uint8) if form == "mxfp4" else codes, scales.view(torch.uint8)]


def quantised_checkpoint(form: str, full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `full` as a quantised checkpoint that vLLM loads, with torchao's codes and scales."""
    found = dict(full)
    for spec, parts in _quantised(form, full):
        del found[spec.tensor.name]
        found |= {
            VLLM_FORMATS[form].parameter(part.name): tensor for part, tensor in zip(spec.tensors(), parts, strict=True)
        }
    return found


def dequantised(form: str, full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `full` after quantisation by torchao and dequantisation, in the same element type."""
    found = dict(full)
    for spec, (codes, scales, *rest) in _quantised(form, full):
        numbers = Quantised(codes, scales.view(getattr(torch, spec.format.scale_dtype)), rest[0] if rest else None)
        found[spec.tensor.name] = dequantise(numbers, spec, dtype=full[spec.tensor.name].dtype)
    return found


def _quantised(form: str, full: dict[str, torch.Tensor]) -> Iterator[tuple[QuantSpec, list[torch.Tensor]]]:
    """Yield the quantised tensors of `full` and their parts; tensors that vLLM fuses share the scale of the tensor."""
    specs = [
        TensorSpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        for name, tensor in full.items()
    ]
    amax: dict[str, torch.Tensor] = {}
    for name, tensor in full.items():
        largest = tensor.abs().amax()
        amax[_fused_name(name)] = torch.maximum(amax.get(_fused_name(name), largest), largest)
    for spec in quantisation_of(specs, recipe_of(form)).specs:
        # Policies publish the experts of a layer as one tensor, which is not quantised.
        if spec is not None and ".experts." not in spec.tensor.name:
            name = spec.tensor.name
            parts = zip(spec.tensors(), torchao_parts(form, full[name], amax[_fused_name(name)]), strict=True)
            yield spec, [tensor.reshape(part.shape).contiguous() for part, tensor in parts]


def _fused_name(name: str) -> str:
    """Return the name of the vLLM parameter that a tensor is fused into."""
    return re.sub(r"\.(q|k|v|gate|up)_proj\.", lambda found: f".{'qkv' if found[1] in 'qkv' else 'both'}.", name)
