"""Bit-for-bit equality with torchao on the full tensor."""

from __future__ import annotations

import pytest
import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, nvfp4_quantize, per_tensor_amax_to_scale
from torchao.quantization.granularity import PerBlock, PerRow
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference
from torchao.quantization.quantize_.workflows.float8.float8_tensor import Float8Tensor

from starling.weightsync.plan.layout import TensorSpec
from starling.weightsync.quantise.formats import (
    FP8_BLOCK,
    FP8_BLOCK_UE8M0,
    FP8_GROUP,
    FP8_GROUP_UE8M0,
    FP8_ROW,
    MXFP4,
    MXFP4_CEIL,
    MXFP8,
    MXFP8_CEIL,
    NVFP4,
    QuantFormat,
)
from starling.weightsync.quantise.spec import QuantSpec
from starling.weightsync.tensors.codes import SMALLEST_SCALE
from starling.weightsync.tensors.quantise import Quantised, dequantise, quantise

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8 = ((FP8_ROW, PerRow()), (FP8_BLOCK, PerBlock([128, 128])), (FP8_GROUP, PerBlock([1, 128])))
FLOOR, CEIL = ScaleCalculationMode.FLOOR, ScaleCalculationMode.RCEIL
MICROSCALED = (
    (MXFP4, torch.float4_e2m1fn_x2, FLOOR),
    (MXFP4_CEIL, torch.float4_e2m1fn_x2, CEIL),
    (MXFP8, torch.float8_e4m3fn, FLOOR),
    (MXFP8_CEIL, torch.float8_e4m3fn, CEIL),
    (FP8_GROUP_UE8M0, torch.float8_e4m3fn, CEIL),
)


def name_of(value: object) -> str:
    return value.name if isinstance(value, QuantFormat) else str(value)


def quantised(tensor: torch.Tensor, form: QuantFormat) -> tuple[Quantised, QuantSpec]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    spec = QuantSpec(tensor=TensorSpec(name="layer.weight", shape=tuple(tensor.shape), dtype=dtype), format=form)
    return quantise(tensor, spec), spec


def weights(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Rows of widely different size; rows, blocks and runs of zeros among them."""
    generator = torch.Generator().manual_seed(7)
    spread = torch.randn((*shape[:-1], 1), generator=generator).mul(3).exp()
    tensor = (torch.randn(shape, generator=generator) * spread * 0.02).clamp(-6e4, 6e4).to(dtype)
    tensor[..., 3, :] = 0
    tensor[..., 7, :128] = -0.0
    tensor[..., 128:256, :128] = 0
    return tensor


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the bytes are equal: NaNs and signs of zero count."""
    first, second = (t.contiguous().flatten().view(torch.uint8) for t in (one, other))
    return torch.equal(first, second)


FLOOR_OF_FP8 = SMALLEST_SCALE * 448
"""Without a least magnitude torchao's scale of a row of zeros is zero, and its codes are NaN."""


def taken(tensor: torch.Tensor) -> torch.Tensor:
    """What torchao is given. float16 it does not take, or rounds the scales to it; float32 holds the same numbers."""
    return tensor.float() if tensor.dtype == torch.float16 else tensor


@pytest.mark.parametrize("shape", [(256, 384), (2, 256, 128)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("form", "granularity"), FP8, ids=name_of)
def test_fp8(form: QuantFormat, granularity: PerRow | PerBlock, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = weights(shape, dtype)
    ours, spec = quantised(tensor, form)
    theirs = Float8Tensor.from_hp(
        taken(tensor), granularity=granularity, kernel_preference=KernelPreference.TORCH, hp_value_lb=FLOOR_OF_FP8
    )
    assert same(ours.data, theirs.qdata)
    assert same(ours.scales, theirs.scale)
    assert same(dequantise(ours, spec), theirs.dequantize(torch.float32))
    plain = Float8Tensor.from_hp(taken(tensor), granularity=granularity, kernel_preference=KernelPreference.TORCH)
    used = plain.scale > 0
    assert bool(used.any())
    assert same(ours.scales[used], plain.scale[used])


@pytest.mark.parametrize("shape", [(256, 384), (2, 256, 128)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("form", "element", "mode"), MICROSCALED, ids=name_of)
def test_microscaled(
    form: QuantFormat, element: torch.dtype, mode: ScaleCalculationMode, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = weights(shape, dtype)
    ours, _ = quantised(tensor, form)
    scales, codes = to_mx(taken(tensor), element, form.columns, mode)
    assert same(ours.data, codes)
    assert same(ours.scales, scales)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_with_powers_of_two(dtype: torch.dtype) -> None:
    """A block is one run of 128 x 128 elements, once its elements lie side by side."""
    tensor = weights((256, 384), dtype)
    ours, _ = quantised(tensor, FP8_BLOCK_UE8M0)
    runs = tensor.float().view(2, 128, 3, 128).transpose(1, 2).reshape(2, -1)
    scales, codes = to_mx(runs, torch.float8_e4m3fn, 128 * 128, CEIL)
    assert same(ours.scales, scales)
    assert same(ours.data, codes.view(2, 3, 128, 128).transpose(1, 2).reshape(256, 384))


@pytest.mark.parametrize("shape", [(256, 384), (2, 256, 128)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nvfp4(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = weights(shape, dtype)
    ours, spec = quantised(tensor, NVFP4)
    full = taken(tensor)
    theirs = NVFP4Tensor.to_nvfp4(full, per_tensor_scale=per_tensor_amax_to_scale(full.abs().max()))
    assert ours.global_scale is not None
    assert same(ours.global_scale, theirs.per_tensor_scale)
    assert same(ours.data, theirs.qdata)
    assert same(ours.scales, theirs.scale)
    assert same(dequantise(ours, spec), theirs.dequantize(torch.float32))


@pytest.mark.parametrize("exponent", [-149, -140, -133, -126, -122, -118, -110, -100, 100, 118, 125])
def test_numbers_at_the_limits_of_float32(exponent: int) -> None:
    generator = torch.Generator().manual_seed(1)
    unit = torch.rand((32, 256), generator=generator, dtype=torch.float64).mul_(2).sub_(1)
    for dtype in (torch.bfloat16, torch.float32):
        tensor = (unit * 2.0**exponent).to(dtype)
        for form, element, mode in MICROSCALED:
            ours, _ = quantised(tensor, form)
            scales, codes = to_mx(tensor, element, form.columns, mode)
            assert same(ours.data, codes), form.name
            assert same(ours.scales, scales), form.name
        for form, granularity in (FP8[0], FP8[2]):
            ours, _ = quantised(tensor, form)
            theirs = Float8Tensor.from_hp(
                tensor, granularity=granularity, kernel_preference=KernelPreference.TORCH, hp_value_lb=FLOOR_OF_FP8
            )
            assert same(ours.data, theirs.qdata), form.name
            assert same(ours.scales, theirs.scale), form.name
        ours, _ = quantised(tensor, NVFP4)
        block_scales, codes = nvfp4_quantize(tensor, 16, ours.global_scale)
        assert same(ours.data, codes)
        assert same(ours.scales, block_scales.view(ours.scales.shape))


@pytest.mark.parametrize("columns", [1, 15, 33, 129, 200])
def test_short_groups_equal_those_of_the_padded_tensor(columns: int) -> None:
    tensor = weights((200, columns), torch.bfloat16)
    padded = torch.nn.functional.pad(tensor, (0, 256 - columns, 0, 256 - 200))
    theirs = Float8Tensor.from_hp(
        padded,
        granularity=PerBlock([128, 128]),
        kernel_preference=KernelPreference.TORCH,
        hp_value_lb=FLOOR_OF_FP8,
    )
    ours, spec = quantised(tensor, FP8_BLOCK)
    assert same(ours.data, theirs.qdata[:200, :columns])
    assert same(ours.scales, theirs.scale[:, : spec.grid[1]])
    scales, codes = to_mx(padded, torch.float4_e2m1fn_x2, 32, FLOOR)
    ours, spec = quantised(tensor, MXFP4)
    assert same(ours.data, codes[:200, : spec.packed_shape[1]])
    assert same(ours.scales, scales[:200, : spec.grid[1]])
    total = per_tensor_amax_to_scale(tensor.abs().max())
    block_scales, codes = nvfp4_quantize(padded, 16, total)
    ours, spec = quantised(tensor, NVFP4)
    assert same(ours.data, codes[:200, : spec.packed_shape[1]])
    assert same(ours.scales, block_scales[:200, : spec.grid[1]])
