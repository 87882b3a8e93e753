"""Quantise tensors, whole or in shards; any split gives the bits of the whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from starling.common.errors import WeightsError
from starling.weightsync.layout import Box
from starling.weightsync.quantise.amax import Amax, partial_amax
from starling.weightsync.quantise.codes import decode, encode, global_scale_of, scales_of, values_of_bytes
from starling.weightsync.quantise.spec import QuantSpec
from starling.weightsync.quantise.tiles import check_shard, folded, tiles


@dataclass(frozen=True)
class Quantised:
    """Codes and scales of a box of a tensor: `packed_box` and `scale_box` of it."""

    data: torch.Tensor
    """`packed_dtype`, contiguous."""
    scales: torch.Tensor
    """The format's `scale_dtype`, contiguous; of a group that the box cuts, the scale of the whole group."""
    global_scale: torch.Tensor | None
    """float32 scalar: the tensor's scale in a format of two levels, else None."""


def empty_quantised(
    box: Box, spec: QuantSpec, device: torch.device | str = "cpu", data: torch.Tensor | None = None
) -> Quantised:
    """Return memory for `box`, uninitialised; that of the codes is `data` if given."""
    if data is None:
        data = torch.empty(spec.packed_box(box).size, dtype=getattr(torch, spec.packed_dtype), device=device)
    return Quantised(
        data=data,
        scales=torch.empty(spec.scale_box(box).size, dtype=getattr(torch, spec.format.scale_dtype), device=device),
        global_scale=torch.empty((), dtype=torch.float32, device=device) if spec.format.two_level else None,
    )


def quantise(tensor: torch.Tensor, spec: QuantSpec, out: Quantised | None = None) -> Quantised:
    """Quantise a whole tensor, into `out` if given. It may have any strides.

    Raises:
        WeightsError: a tensor or `out` that does not fit `spec`, or an infinite or NaN element.
    """
    box = _whole(spec)
    return quantise_with(tensor, box, partial_amax(tensor, box, spec), spec, out)


def quantise_with(
    shard: torch.Tensor, box: Box, amax: Amax, spec: QuantSpec, out: Quantised | None = None
) -> Quantised:
    """Quantise `shard`, which is `box` of the tensor, by the maxima of whole groups, into `out` if given.

    `amax` is this rank's `partial_amax`, combined with those of the ranks that share its groups (and, for a format of
    two levels, of all ranks). Working memory beside the result: a few float32 tiles.

    Raises:
        WeightsError: a shard, `amax` or `out` that does not fit `box`, or a box that cuts through a byte of codes.
    """
    check_shard(shard, box, spec)
    if spec.format.two_level and amax.total is None:
        raise WeightsError(
            f"The maxima for tensor {spec.tensor.name} lack the tensor's own; {spec.format.name} needs it."
        )
    amax = amax.part(spec.scale_box(box))
    if out is None:
        out = empty_quantised(box, spec, shard.device)
    else:
        _check_out(out, box, spec)
    global_scale = None
    if out.global_scale is not None and amax.total is not None:
        global_scale = global_scale_of(amax.total.to(shard.device), spec.format)
        out.global_scale.copy_(global_scale)
    source, data, stored = folded(shard.detach(), spec), folded(out.data, spec), folded(out.scales, spec)
    groups = folded(amax.groups.to(shard.device), spec)
    for tile in tiles(box, spec, shard.device):
        scales = scales_of(groups[tile.groups], global_scale, spec.format, shard.dtype)
        stored[tile.groups] = scales.stored
        scaled = source[tile.elements].to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        blocks, factor = scaled.view(tile.blocks), scales.factor[:, :, None, :, None]
        if scales.divide:
            blocks.div_(factor)
        else:
            blocks.mul_(factor)
        data[(*tile.elements[:2], _packed(tile.elements[2], spec))] = encode(scaled, spec.format)
    return out


def dequantise(
    quantised: Quantised, spec: QuantSpec, box: Box | None = None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return the values of `box` (of all, if None): code x scale in float32, then rounded to `dtype`.

    Raises:
        WeightsError: parts that do not fit `box`.
    """
    box = box or _whole(spec)
    _check_out(quantised, box, spec)
    result = torch.empty(box.size, dtype=dtype, device=quantised.data.device)
    scales = quantised.scales.float()
    if quantised.global_scale is not None:
        scales = quantised.global_scale * scales
    data, factor, target = folded(quantised.data, spec), folded(scales, spec), folded(result, spec)
    values = values_of_bytes(spec.format, data.device)
    for tile in tiles(box, spec, data.device):
        columns = tile.elements[2]
        packed = data[(*tile.elements[:2], _packed(columns, spec))]
        decoded = decode(packed, values, columns.stop - columns.start)
        blocks = decoded.reshape(tile.blocks) * factor[tile.groups][:, :, None, :, None]
        target[tile.elements] = blocks.view(decoded.shape)
    return result


def _whole(spec: QuantSpec) -> Box:
    return Box(offset=(0,) * len(spec.tensor.shape), size=spec.tensor.shape)


def _packed(columns: slice, spec: QuantSpec) -> slice:
    """Return the bytes or codes of packed data that hold `columns`, which begin at an even one if codes are paired."""
    per_byte = spec.format.codes_per_byte
    return slice(columns.start // per_byte, -(-columns.stop // per_byte))


def _check_out(out: Quantised, box: Box, spec: QuantSpec) -> None:
    expected = [(spec.packed_box(box).size, spec.packed_dtype), (spec.scale_box(box).size, spec.format.scale_dtype)]
    for tensor, (size, dtype) in zip((out.data, out.scales), expected, strict=True):
        found = str(tensor.dtype).removeprefix("torch.")
        if (tuple(tensor.shape), found) != (size, dtype) or not tensor.is_contiguous():
            raise WeightsError(
                f"Box {box} of tensor {spec.tensor.name} in {spec.format.name} is {dtype} {size}, contiguous; "
                f"got {found} {tuple(tensor.shape)}."
            )
    if (out.global_scale is None) == spec.format.two_level:
        raise WeightsError(
            f"Tensor {spec.tensor.name} in {spec.format.name} has {'a' if spec.format.two_level else 'no'} scale of "
            "the whole tensor."
        )
