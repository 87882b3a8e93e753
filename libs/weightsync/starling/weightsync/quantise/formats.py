"""Quantised formats: element type, group size, and the rule for scales."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from starling.common.errors import WeightsError

ScaleRule = Literal["linear", "two_level", "exponent_floor", "exponent_ceil"]


class QuantFormat(msgspec.Struct, frozen=True, kw_only=True):
    """One quantised format.

    Raises:
        WeightsError: an inconsistent combination of fields.
    """

    name: str
    element: Literal["float8_e4m3fn", "float4_e2m1fn"]
    """The type of a code; its largest value is 448 or 6."""
    rows: int
    """Size of a group along the second-to-last dim."""
    columns: int
    """Size of a group along the last dim; 0 for all of it."""
    rule: ScaleRule
    """From a group's largest magnitude `amax` to its scale:

    - `linear`: amax / largest code, rounded to bfloat16 if the original is bfloat16.
    - `two_level`: amax / largest code / the tensor's scale, which is the tensor's amax / (448 x 6), float32.
    - `exponent_floor`: the power of two that maps amax's power of two to the largest code's (OCP MX).
    - `exponent_ceil`: the smallest power of two that is not below amax / largest code.
    """
    scale_dtype: Literal["float32", "float8_e4m3fn", "float8_e8m0fnu"]
    scale_suffix: str = "_scale"
    """Suffix of the scales' name after the tensor's name."""

    def __post_init__(self) -> None:
        if self.rows < 1 or self.columns < 0 or (self.element == "float4_e2m1fn" and self.columns % 2):
            raise WeightsError(f"Format {self.name} cannot have groups of {self.rows} x {self.columns} elements.")
        kinds = {"linear": ("float32",), "two_level": ("float8_e4m3fn",)}.get(self.rule, ("float8_e8m0fnu", "float32"))
        if self.scale_dtype not in kinds:
            raise WeightsError(
                f"Format {self.name} has {self.scale_dtype} scales; rule {self.rule} needs {' or '.join(kinds)}."
            )

    @property
    def codes_per_byte(self) -> int:
        """1 or 2."""
        return 2 if self.element == "float4_e2m1fn" else 1

    @property
    def largest(self) -> float:
        """The largest magnitude of a code."""
        return 6.0 if self.element == "float4_e2m1fn" else 448.0

    @property
    def two_level(self) -> bool:
        """Whether the whole tensor has a scale too."""
        return self.rule == "two_level"


def _fp8(name: str, rows: int, columns: int, power_of_two: bool = False) -> QuantFormat:
    return QuantFormat(
        name=name,
        element="float8_e4m3fn",
        rows=rows,
        columns=columns,
        rule="exponent_ceil" if power_of_two else "linear",
        scale_dtype="float8_e8m0fnu" if power_of_two else "float32",
        scale_suffix="_scale_inv" if columns else "_scale",
    )


def _microscaled(
    name: str, element: Literal["float8_e4m3fn", "float4_e2m1fn"], rule: Literal["exponent_floor", "exponent_ceil"]
) -> QuantFormat:
    return QuantFormat(name=name, element=element, rows=1, columns=32, rule=rule, scale_dtype="float8_e8m0fnu")


FP8_ROW: Final = _fp8("fp8_row", 1, 0)
"""One float32 scale per output row."""
FP8_BLOCK: Final = _fp8("fp8_block", 128, 128)
"""Blocks of 128 x 128, float32 scales; `weight_scale_inv` in checkpoints."""
FP8_GROUP: Final = _fp8("fp8_group", 1, 128)
"""Runs of 128 elements of a row, float32 scales."""
FP8_BLOCK_UE8M0: Final = _fp8("fp8_block_ue8m0", 128, 128, power_of_two=True)
"""As `FP8_BLOCK`, scales that are powers of two; with `scale_dtype="float32"` they are sent as float32."""
FP8_GROUP_UE8M0: Final = _fp8("fp8_group_ue8m0", 1, 128, power_of_two=True)
"""As `FP8_GROUP`, scales that are powers of two."""
NVFP4: Final = QuantFormat(
    name="nvfp4", element="float4_e2m1fn", rows=1, columns=16, rule="two_level", scale_dtype="float8_e4m3fn"
)
"""Runs of 16 elements with e4m3 scales, and one float32 scale of the tensor: value = code x scale x tensor's scale."""
MXFP4: Final = _microscaled("mxfp4", "float4_e2m1fn", "exponent_floor")
"""Runs of 32 elements; the exponent is rounded down, as in the OCP specification."""
MXFP8: Final = _microscaled("mxfp8", "float8_e4m3fn", "exponent_floor")
"""Runs of 32 elements; the exponent is rounded down."""
MXFP4_CEIL: Final = _microscaled("mxfp4_ceil", "float4_e2m1fn", "exponent_ceil")
"""As `MXFP4`; the exponent is rounded up, so that nothing is clipped."""
MXFP8_CEIL: Final = _microscaled("mxfp8_ceil", "float8_e4m3fn", "exponent_ceil")
"""As `MXFP8`; the exponent is rounded up."""

FORMATS: Final[dict[str, QuantFormat]] = {
    one.name: one
    for one in (
        FP8_ROW,
        FP8_BLOCK,
        FP8_GROUP,
        FP8_BLOCK_UE8M0,
        FP8_GROUP_UE8M0,
        NVFP4,
        MXFP4,
        MXFP8,
        MXFP4_CEIL,
        MXFP8_CEIL,
    )
}
"""The formats by name."""
