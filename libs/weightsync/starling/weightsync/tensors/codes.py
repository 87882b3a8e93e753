"""Arithmetic of quantised formats: scales from maxima, codes from scaled numbers, and back.

Every operation is elementwise and in float32, so the bits do not depend on how a tensor is split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from starling.weightsync.quantise.formats import QuantFormat

SMALLEST_SCALE: Final = 2.0**-126
"""Smallest scale of the `linear` rule, used for zeros: float32's smallest normal number."""
SMALLEST_GLOBAL_SCALE: Final = 2.0**-120
"""Smallest scale of a whole tensor: its reciprocal over the smallest scale of a group (2^-6) is still finite."""
_SMALLEST_E4M3_SCALE: Final = 2.0**-6
_LARGEST_POWER: Final[dict[str, int]] = {"float8_e4m3fn": 8, "float4_e2m1fn": 2}
"""Exponent of the largest code of each type."""


@dataclass(frozen=True)
class Scales:
    """Scales of groups as they are sent, and the factors that scale elements before encoding."""

    stored: torch.Tensor
    factor: torch.Tensor
    """float32, of the shape of `stored`."""
    divide: bool
    """Whether elements are divided by `factor`; else multiplied."""


def global_scale_of(total: torch.Tensor, form: QuantFormat) -> torch.Tensor:
    """Return the scale of a tensor with largest magnitude `total`, for a two-level format; float32."""
    span = 448.0 * form.largest
    return total.clamp(min=SMALLEST_GLOBAL_SCALE * span) / span


def scales_of(amax: torch.Tensor, global_scale: torch.Tensor | None, form: QuantFormat, dtype: torch.dtype) -> Scales:
    """Return the scales of groups with largest magnitudes `amax` (float32) in a tensor of `dtype`.

    `global_scale` is the scale of the whole tensor, for a two-level format.
    """
    if form.rule == "linear":
        scale = amax.clamp(min=SMALLEST_SCALE * form.largest) / form.largest
        if dtype == torch.bfloat16:
            scale = scale.bfloat16().float()
        return Scales(stored=scale, factor=scale, divide=True)
    if form.rule == "two_level":
        assert global_scale is not None
        scale = amax / form.largest / global_scale
        stored = scale.clamp(min=_SMALLEST_E4M3_SCALE, max=448.0).to(torch.float8_e4m3fn)
        return Scales(stored=stored, factor=(1.0 / global_scale) / stored.float(), divide=False)
    # A power of two is an exponent: float32's own bits, biased by 127 as e8m0 is. 0 stands for 2^-127.
    if form.rule == "exponent_floor":
        exponent = ((amax.view(torch.int32) >> 23) - _LARGEST_POWER[form.element]).clamp_(min=0)
        power = _power_of_two(exponent.clamp(min=1))
    else:
        bits = (amax / form.largest).view(torch.int32)
        exponent = ((bits + 0x7FFFFF) >> 23).masked_fill_(bits <= 0x400000, 0)
        # Numbers below 2^-127 have code zero, so such groups need no scaling.
        power = _power_of_two(exponent.masked_fill(exponent == 0, 127))
    if form.scale_dtype == "float8_e8m0fnu":
        stored = exponent.to(torch.uint8).view(torch.float8_e8m0fnu)
    else:
        stored = _power_of_two(exponent.clamp(min=1))
    return Scales(stored=stored, factor=1.0 / power, divide=False)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Return the float32 with the biased `exponent` (1 to 254, int32)."""
    return (exponent << 23).view(torch.float32)


def encode(scaled: torch.Tensor, form: QuantFormat) -> torch.Tensor:
    """Return the packed codes of contiguous, scaled float32 numbers, rounded to nearest, ties to even.

    Numbers beyond the largest code are clamped to it. `scaled` is overwritten.
    """
    scaled.clamp_(-form.largest, form.largest)
    if form.codes_per_byte == 1:
        return scaled.to(torch.float8_e4m3fn)
    return _packed(_e2m1(scaled))


def _e2m1(x: torch.Tensor) -> torch.Tensor:
    """Return the four-bit codes of |x| <= 6: sign, two bits of exponent, one of mantissa."""
    bits = x.view(torch.int32)
    # To |x| in [2^e, 2^(e+1)), e >= 0, add 2^(e+22): the sum's last bit is worth 2^(e-1), a step of e2m1 there (and
    # below 1, with e = 0). The addition rounds as the code must round, and the sum's low bits count the steps.
    anchor = (bits & 0x7F800000).clamp_(min=127 << 23).add_(22 << 23)
    steps = x.abs().add_(anchor.view(torch.float32)).view(torch.int32).sub_(anchor)
    # Two codes per binade: `anchor >> 22` is 2 x (e + 22 + 127).
    code = steps.add_(anchor.bitwise_right_shift_(22)).sub_(2 * (22 + 127))
    return code.bitwise_or_((bits >> 28).bitwise_and_(8)).to(torch.uint8)


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """Pack neighbours of the last dim into bytes, the even one in the low bits."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    pairs = codes.view(torch.int16)  # the even one is the low byte: little-endian, as all sent data
    return pairs.bitwise_or_(pairs >> 4).to(torch.uint8)


def values_of_bytes(form: QuantFormat, device: torch.device) -> torch.Tensor:
    """Return the values of the codes in each of the 256 bytes: a float32, or two of them in the bits of an int64."""
    byte = torch.arange(256, dtype=torch.uint8)
    if form.codes_per_byte == 1:
        return byte.view(torch.float8_e4m3fn).float().to(device)
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float32)
    codes = torch.stack((byte & 15, byte >> 4), -1).long()
    return torch.cat((magnitudes, -magnitudes))[codes].view(torch.int64).flatten().to(device)


def decode(packed: torch.Tensor, values: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the float32 values of packed codes whose last dim has `columns` codes, by the table `values`.

    On the CPU a look-up is several times faster than torch's conversion from float8.
    """
    found = values.index_select(0, packed.view(torch.uint8).flatten().int()).view(torch.float32)
    return found.view(*packed.shape[:-1], -1)[..., :columns]
