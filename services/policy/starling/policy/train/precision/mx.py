"""Linear layers in the MX formats of torchao, in which 32 numbers in a row share a scale, a power of two.

Imports torchao, which takes seconds: import this module only where it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torchao.prototype.moe_training.mxfp8_linear import mx_mm  # type: ignore[import-untyped]
from torchao.prototype.mx_formats.config import (  # type: ignore[import-untyped]
    MXFP8Dim0CastKernelChoice,
    MXFP8Dim1CastKernelChoice,
    ScaleCalculationMode,
)
from torchao.prototype.mx_formats.mx_tensor import MXTensor, to_dtype  # type: ignore[import-untyped]
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference  # type: ignore[import-untyped]

BLOCK: Final = 32
"""Numbers that share a scale."""
_FP4: Final = torch.float4_e2m1fn_x2


def replace_layers(model: torch.nn.Module, names: Sequence[str], kind: str, *, emulate: bool) -> None:
    """Replace linear layers of `model`, in place, by layers with the same parameters; see `float8.replace_layers`."""
    kinds = {"mxfp8": _Mxfp8Linear, "mxfp4": _Mxfp4Linear}
    for name in names:
        linear: Any = model.get_submodule(name)
        with torch.device("meta"):
            layer = kinds[kind](linear.in_features, linear.out_features, bias=False)
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.kernels = KernelPreference.EMULATED if emulate else KernelPreference.AUTO
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, layer.train(linear.training))


class _MxLinear(torch.nn.Linear):
    """A linear layer with another product."""

    kernels: KernelPreference

    def forward(self, input: Tensor) -> Tensor:
        """Return the product of `input` [..., K] and the weight [N, K], and add the bias."""
        output = self._product(input.reshape(-1, self.in_features).contiguous())
        output = output.to(input.dtype).view(*input.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias

    def _product(self, rows: Tensor) -> Tensor:
        raise NotImplementedError


class _Mxfp8Linear(_MxLinear):
    """All three products in MXFP8 (e4m3)."""

    def _product(self, rows: Tensor) -> Tensor:
        # The gradient of the weight has scales for 32 tokens. Zeros beside them change neither those nor a sum.
        missing = -len(rows) % BLOCK
        element, emulate = torch.float8_e4m3fn, self.kernels is KernelPreference.EMULATED
        output: Tensor = mx_mm.apply(
            torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows,
            self.weight,
            element,
            element,
            element,
            BLOCK,
            self.kernels,
            MXFP8Dim0CastKernelChoice.TORCH if emulate else MXFP8Dim0CastKernelChoice.TRITON,
            MXFP8Dim1CastKernelChoice.TORCH,
            ScaleCalculationMode.RCEIL,
            False,
        )
        return output[: len(rows)]


class _Mxfp4Linear(_MxLinear):
    """The output in MXFP4, with the codes of `weights.quantise = "mxfp4"`; gradients in the type of the weight."""

    def _product(self, rows: Tensor) -> Tensor:
        output: Tensor = _Mxfp4Product.apply(rows, self.weight, self.kernels)  # type: ignore[no-untyped-call]
        return output


class _Mxfp4Product(torch.autograd.Function):
    """A product of codes whose gradients are those of the product of the decoded numbers."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, kernels: KernelPreference) -> Tensor:
        """Multiply rows [T, K] by a weight [N, K]; only the codes and scales of both are kept."""
        first, second = (
            MXTensor.to_mx(one, _FP4, BLOCK, ScaleCalculationMode.FLOOR, kernels) for one in (rows, weight)
        )
        ctx.save_for_backward(first.qdata, first.scale, second.qdata, second.scale)
        product: Tensor = torch.mm(first, second.t())
        return product

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of rows and weight."""
        codes, scales, weight_codes, weight_scales = ctx.saved_tensors
        rows = to_dtype(codes, scales, _FP4, BLOCK, gradient.dtype)
        weight = to_dtype(weight_codes, weight_scales, _FP4, BLOCK, gradient.dtype)
        return gradient @ weight, gradient.t() @ rows, None
