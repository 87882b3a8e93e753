"""Media of samples: what their bytes are, where they lie, and which of them a scorer gets. Pure.

The bytes lie in buffers that worker processes map (`score/workers/shared.py`); here are only their descriptions. A
request has any number of tensors, each with the media of one or more samples of one form; a sample knows its tensor
and row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol

import msgspec

MediaKind = Literal["pixels", "latents", "token_ids"]
Input = Literal["text", "pixels", "latents", "token_ids"]
"""What a scorer reads of a sample: its texts only, or these with its media."""
INPUTS: Final[tuple[Input, ...]] = ("text", "pixels", "latents", "token_ids")

ITEM_BYTES: Final[Mapping[str, int]] = {"uint8": 1, "float16": 2, "bfloat16": 2, "float32": 4, "int32": 4}
"""Bytes of an element by its dtype, as numpy names it."""
KIND_DTYPES: Final[Mapping[MediaKind, tuple[str, ...]]] = {
    "pixels": ("uint8",),
    "latents": ("float16", "bfloat16", "float32"),
    "token_ids": ("int32",),
}
DIMS: Final[Mapping[MediaKind, tuple[str, ...]]] = {
    "pixels": ("T", "H", "W", "3"),
    "latents": ("C", "T", "H", "W"),
    "token_ids": ("N",),
}
"""Dimensions of one sample."""
NUM_COLOURS: Final = 3
MAX_FPS: Final = 1000.0


class MediaForm(msgspec.Struct, frozen=True, array_like=True):
    """What the media of one sample are.

    Pixels are uint8 of shape [T, H, W, 3], an image those of T = 1; latents are floating-point of shape [C, T, H, W];
    the token ids of a completion, which may be empty, are int32. All are little-endian, in C order.
    """

    kind: MediaKind
    dtype: str
    """One of `KIND_DTYPES`."""
    shape: tuple[int, ...]
    fps: float = 0.0
    """Frames per second of the pixels; 0 if not known."""

    @property
    def size_bytes(self) -> int:
        """Bytes of one sample."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def form_problem(form: MediaForm) -> str | None:
    """Return why there is no such form, as the end of a sentence about it; None if there is."""
    if form.dtype not in KIND_DTYPES[form.kind]:
        return f"have dtype {form.dtype}; send {' or '.join(KIND_DTYPES[form.kind])}"
    dims = DIMS[form.kind]
    if len(form.shape) != len(dims) or (form.kind == "pixels" and form.shape[-1] != NUM_COLOURS):
        return f"have shape {list(form.shape)}; send [{', '.join(dims)}]"
    if min(form.shape) < 1 and form.kind != "token_ids":
        return f"are empty, of shape {list(form.shape)}; send at least one frame"
    if not 0.0 <= form.fps <= MAX_FPS:  # not so for NaN
        return f"have {form.fps} frames per second; send 0 to {MAX_FPS:g}"
    return None


class MediaBuffer(Protocol):
    """Memory with media, which is freed when nothing refers to its object any more."""

    @property
    def size_bytes(self) -> int:
        """Its length."""

    def read(self, offset: int, num_bytes: int, /) -> bytes:
        """Return a copy of some of its bytes."""


@dataclass(frozen=True, slots=True)
class MediaTensor:
    """Media of samples that have one form, one after another."""

    form: MediaForm
    num: int
    """How many samples."""
    buffer: MediaBuffer
    """Tensors may share one."""
    offset: int = 0
    """Where the first sample begins in the buffer, in bytes."""

    def __post_init__(self) -> None:
        assert form_problem(self.form) is None
        assert self.num > 0
        assert self.offset >= 0
        assert self.offset + self.num * self.form.size_bytes <= self.buffer.size_bytes

    def offset_of(self, row: int) -> int:
        """Return where a sample begins in the buffer, in bytes."""
        assert 0 <= row < self.num
        return self.offset + row * self.form.size_bytes

    def read(self, row: int) -> bytes:
        """Return a copy of the media of a sample."""
        return self.buffer.read(self.offset_of(row), self.form.size_bytes)


class MediaRow(NamedTuple):
    """Place of a sample's media."""

    tensor: int
    """Index of the tensor in the task, or in the request."""
    row: int = 0


def lacks(wanted: Input, kind: MediaKind | None) -> bool:
    """Whether a scorer that reads `wanted` cannot score a sample with media of `kind`, None without media."""
    return wanted not in ("text", kind)
