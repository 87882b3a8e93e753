"""Linear layers of quantised weights for vLLM's build for CPUs, which has none that every CPU can run.

They make numbers of the codes whenever they are used, as the embedded engine does, and multiply in the precision of the
activations. So what an adoption puts in place can be seen in log-probabilities, on any machine.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from starling.weightsync.plan.layout import TensorSpec
from starling.weightsync.quantise.formats import FP8_BLOCK, FP8_ROW, MXFP4, MXFP8, NVFP4, QuantFormat
from starling.weightsync.quantise.spec import QuantSpec
from starling.weightsync.tensors.quantise import Quantised, dequantise


class Dequantising:
    """What vLLM asks of a kernel of any form; see its `model_executor/kernels/linear`."""

    form: ClassVar[QuantFormat]
    supports_pre_processed_weights = False

    def __init__(self, config: Any, layer_param_names: Any = ()) -> None:
        """Take what vLLM gives; the layer itself says the rest."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Return that it runs here."""
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        """Return that it takes any layer."""
        return True, None

    def input_quant_key(self) -> None:
        """Return that activations come as they are."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Leave the layer as its scheme made it."""

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return `x` [..., in_features] times the transposed weight, plus the bias: [..., out_features]."""
        codes = layer.weight.data
        if self.form is FP8_ROW:  # its scheme transposes it
            codes = codes.t()
        scales = layer.weight_scale.data.view(getattr(torch, self.form.scale_dtype))
        total = layer.weight_global_scale.data if self.form.two_level else None
        shape = (codes.shape[0], codes.shape[1] * self.form.codes_per_byte)
        spec = QuantSpec(tensor=TensorSpec(name="weight", shape=shape, dtype="float32"), format=self.form)
        return torch.nn.functional.linear(x, dequantise(Quantised(codes, scales, total), spec, dtype=x.dtype), bias)


class _Fp8Row(Dequantising):
    form = FP8_ROW


class _Fp8Block(Dequantising):
    form = FP8_BLOCK


class _Mxfp8(Dequantising):
    form = MXFP8


class _Mxfp4(Dequantising):
    form = MXFP4


class _Nvfp4(Dequantising):
    form = NVFP4


def install_kernels() -> None:
    """Have vLLM choose them; to be called in a worker before it builds its model."""
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
    linear.MarlinNvFp4LinearKernel = _Nvfp4  # the one that weights alone are multiplied by, without being asked
