"""Settings of the precision of matrix products (`docs/how-to/train-in-fp8.md`)."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import model_validator

from starling.common.settings import SettingsSection

PrecisionKind = Literal["none", "fp8_tensorwise", "fp8_rowwise", "fp8_rowwise_gw_hp", "mxfp8", "mxfp4"]


class PrecisionSettings(SettingsSection):
    """Precision in which the linear layers of the transformer blocks multiply, forward and backward.

    Weights, gradients, optimizer and versions keep the types that they have without it; heads, embeddings, norms,
    routers and routed experts compute in `model.dtype`.
    """

    kind: PrecisionKind = "none"
    """`fp8_tensorwise`: all three products in FP8, with one scale for each tensor; the fastest. `fp8_rowwise`: with one
    for each row, a power of two; closer to `model.dtype`. `fp8_rowwise_gw_hp`: likewise, and gradients of weights in
    `model.dtype`; the closest. `mxfp8`: all three in FP8, with a scale for 32 numbers. `mxfp4`: the output in FP4,
    likewise, and gradients in `model.dtype`, to train for rollouts with `weights.quantise = "mxfp4"`. `none`: all
    products in `model.dtype`. Needs `starling-policy[low-precision]` and, on a GPU, compute capability 8.9 (10.0 for
    `mxfp8`); on a CPU, and `mxfp4` on older GPUs, it is emulated, which is slower than `none`."""
    skip: tuple[str, ...] = ()
    """Regular expressions for the names of further weights whose layers compute in `model.dtype`; each must match
    one."""
    fsdp_all_gather: bool = False
    """Gather the weights that the ranks of `parallel.dp_shard` and `parallel.cp` share as FP8 codes, half the bytes of
    bfloat16. Needs `fp8_tensorwise`."""

    @model_validator(mode="after")
    def _patterns_are_regular_expressions(self) -> Self:
        for pattern in self.skip:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"skip has {pattern!r}, which is not a regular expression: {error}") from None
        return self

    @model_validator(mode="after")
    def _applies(self) -> Self:
        if self.kind == "none" and (self.skip or self.fsdp_all_gather):
            name = "skip" if self.skip else "fsdp_all_gather"
            raise ValueError(f'{name} has no effect with kind = "none": remove it, or set kind')
        if self.fsdp_all_gather and self.kind != "fp8_tensorwise":
            raise ValueError(
                f'fsdp_all_gather = true with kind = "{self.kind}", and only codes with one scale for each tensor are '
                'gathered: set kind = "fp8_tensorwise", or fsdp_all_gather = false'
            )
        return self
