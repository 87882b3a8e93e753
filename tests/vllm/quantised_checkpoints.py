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


def torchaos(form: str, tensor: torch.Tensor, amax: torch.Tensor) -> list[torch.Tensor]:
    """Codes, scales, and the tensor's scale where the form has one; `amax` is that of all tensors that have it too."""
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


def in_codes(form: str, full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a checkpoint that vLLM loads, of what is in `full`; codes and scales are torchao's."""
    found = dict(full)
    for spec, parts in _quantised(form, full):
        del found[spec.tensor.name]
        found |= {
            VLLM_FORMATS[form].parameter(part.name): tensor for part, tensor in zip(spec.tensors(), parts, strict=True)
        }
    return found


def dequantised(form: str, full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what is in `full` with the numbers of torchao's codes and scales, in the same element type."""
    found = dict(full)
    for spec, (codes, scales, *rest) in _quantised(form, full):
        numbers = Quantised(codes, scales.view(getattr(torch, spec.format.scale_dtype)), rest[0] if rest else None)
        found[spec.tensor.name] = dequantise(numbers, spec, dtype=full[spec.tensor.name].dtype)
    return found


def _quantised(form: str, full: dict[str, torch.Tensor]) -> Iterator[tuple[QuantSpec, list[torch.Tensor]]]:
    """Yield what is quantised of `full`, and its parts; tensors that vLLM makes one of have one scale of the tensor."""
    specs = [
        TensorSpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        for name, tensor in full.items()
    ]
    amax: dict[str, torch.Tensor] = {}
    for name, tensor in full.items():
        largest = tensor.abs().amax()
        amax[_together(name)] = torch.maximum(amax.get(_together(name), largest), largest)
    for spec in quantisation_of(specs, recipe_of(form)).specs:
        if spec is not None:
            name = spec.tensor.name
            parts = zip(spec.tensors(), torchaos(form, full[name], amax[_together(name)]), strict=True)
            yield spec, [tensor.reshape(part.shape).contiguous() for part, tensor in parts]


def _together(name: str) -> str:
    """Return the name of what vLLM makes of a tensor."""
    return re.sub(r"\.(q|k|v|gate|up)_proj\.", lambda found: f".{'qkv' if found[1] in 'qkv' else 'both'}.", name)
