"""Kernels for quantised linear layers on vLLM's CPU build, which has none that runs on every CPU.

Like the embedded engine, they dequantise the weight in each call and multiply in the precision of the activations. They
exist so that adoptions of quantised weights can be tested on any machine.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from starling.weightsync.plan.layout import TensorSpec
from starling.weightsync.quantise.formats import FP8_BLOCK, FP8_ROW, MXFP4, MXFP8, NVFP4, QuantFormat
from starling.weightsync.quantise.spec import QuantSpec
from starling.weightsync.tensors.quantise import Quantised, dequantise


class Dequantising:
    """vLLM's kernel interface for all formats; see its `model_executor/kernels/linear`."""

    format: ClassVar[QuantFormat]
    supports_pre_processed_weights = False

    def __init__(self, config: Any, layer_param_names: Any = ()) -> None:
        """Accept vLLM's arguments; the layer has everything that is needed."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Return that the kernel runs on this device."""
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        """Return that the kernel takes any layer."""
        return True, None

    def input_quant_key(self) -> None:
        """Return None: activations are not quantised."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Keep the layer as its scheme created it."""

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return `x` [..., in_features] times the transposed weight, plus the bias: [..., out_features]."""
        codes = layer.weight.data
        if self.format is FP8_ROW:  # its scheme transposes the weight
            codes = codes.t()
        scales = layer.weight_scale.data.view(getattr(torch, self.format.scale_dtype))
        total = layer.weight_global_scale.data if self.format.two_level else None
        shape = (codes.shape[0], codes.shape[1] * self.format.codes_per_byte)
        spec = QuantSpec(tensor=TensorSpec(name="weight", shape=shape, dtype="float32"), format=self.format)
        return torch.nn.functional.linear(x, dequantise(Quantised(codes, scales, total), spec, dtype=x.dtype), bias)


class _Fp8Row(Dequantising):
    format = FP8_ROW


class _Fp8Block(Dequantising):
    format = FP8_BLOCK


class _Mxfp8(Dequantising):
    format = MXFP8


class _Mxfp4(Dequantising):
    format = MXFP4


class _Nvfp4(Dequantising):
    format = NVFP4


def install_kernels() -> None:
    """Make vLLM choose these kernels; call it in a worker before the model is built."""
    import vllm.model_executor.kernels.linear as linear
    from vllm.platforms import PlatformEnum

    for kernels, ours in (
        (linear._POSSIBLE_FP8_KERNELS, _Fp8Row),
        (linear._POSSIBLE_FP8_BLOCK_KERNELS, _Fp8Block),
        (linear._POSSIBLE_MXFP8_KERNELS, _Mxfp8),
        (linear._POSSIBLE_MXFP4_KERNELS, _Mxfp4),
    ):
        table: Any = kernels
        table[PlatformEnum.CPU] = [ours]
    linear.MarlinNvFp4LinearKernel = _Nvfp4  # vLLM's only weight-only kernel for NVFP4, used without a selection
