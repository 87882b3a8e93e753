"""Pixels and latents of samples, from arrays of numpy or tensors of torch, as the bytes of `.npy` files.

torch is not imported: a tensor can only come from a process that has imported it.
"""

from __future__ import annotations

import io
import math
import sys
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from starling.common.errors import ConfigError

Array = npt.NDArray[Any]
MediaKind = Literal["pixels", "latents"]

BFLOAT16: Final = "bfloat16"
LATENT_DTYPES: Final = ("float16", "float32", BFLOAT16)
NPY_DTYPES: Final = ("|u1", "<f2", "<f4", "|V2")
"""What is written, by the descriptions in the header of a file; two opaque bytes are bfloat16."""
MAX_FPS: Final = 1000.0


@dataclass(frozen=True, slots=True, eq=False)
class Media:
    """Pixels or latents of one sample; made by `pixels` and `latents`."""

    kind: MediaKind
    dtype: str
    """uint8 for pixels; float16, float32 or bfloat16 for latents."""
    data: Array
    """Pixels ``[T, H, W, 3]``; latents ``[C, T, H, W]``, and as bytes ``[C, T, H, 2 W]`` in bfloat16."""
    fps: float

    @property
    def is_finite(self) -> bool:
        """Whether no value is NaN or infinite."""
        if self.kind == "pixels":
            return True
        if self.dtype == BFLOAT16:
            exponents = self.data.view("<u2") & 0x7F80
            return not bool((exponents == 0x7F80).any())
        return bool(np.isfinite(self.data).all())


def pixels(array: Any, fps: float = 16.0) -> Media:
    """Return the media of an image or a video.

    Args:
        array: uint8, ``[H, W, 3]`` or ``[T, H, W, 3]``; of numpy, or a tensor of torch on any device.
        fps: frames per second; without effect on images.

    Raises:
        ConfigError: it is none.
    """
    data, dtype = _to_numpy(array)
    if dtype != "uint8":
        raise ConfigError(f"pixels have the dtype {dtype}; give uint8, from 0 to 255")
    if data.ndim == 3:
        data = data[np.newaxis]
    if data.ndim != 4 or data.shape[-1] != 3 or not data.size:
        raise ConfigError(f"pixels have the shape {list(np.shape(array))}; give [H, W, 3] or [T, H, W, 3]")
    return Media("pixels", dtype, data, _checked_fps(fps))


def latents(array: Any, fps: float = 16.0) -> Media:
    """Return the media of a latent video.

    Args:
        array: float16, float32 or bfloat16, ``[C, T, H, W]``; of numpy, or a tensor of torch on any device. numpy has
            no bfloat16: give its bytes as uint8, ``[C, T, H, 2 W]``.
        fps: frames per second of the decoded video.

    Raises:
        ConfigError: it is none.
    """
    data, dtype = _to_numpy(array)
    if dtype == "uint8" and data.ndim == 4 and data.shape[-1] % 2 == 0:
        data, dtype = np.ascontiguousarray(data), BFLOAT16
    if dtype not in LATENT_DTYPES:
        raise ConfigError(f"latents have the dtype {dtype}; give {', '.join(LATENT_DTYPES)}")
    if data.ndim != 4 or not data.size:
        raise ConfigError(f"latents have the shape {list(np.shape(array))}; give [C, T, H, W]")
    return Media("latents", dtype, data, _checked_fps(fps))


def npy_bytes(array: Array) -> bytes:
    """Return an array as the bytes of a `.npy` file, version 1.0, in C order.

    Raises:
        ConfigError: its dtype is not one of `NPY_DTYPES`.
    """
    if array.dtype not in [np.dtype(name) for name in NPY_DTYPES]:
        raise ConfigError(f"an array has the dtype {array.dtype.str}; give {', '.join(NPY_DTYPES)}")
    whole = np.ascontiguousarray(array)
    header = io.BytesIO()
    fields = np.lib.format.header_data_from_array_1_0(whole)  # type: ignore[no-untyped-call]
    np.lib.format.write_array_header_1_0(header, fields)  # type: ignore[no-untyped-call]
    return b"".join((header.getvalue(), whole.reshape(-1).view(np.uint8).data))


def _to_numpy(array: Any) -> tuple[Array, str]:
    """Return an array and the name of its dtype; bfloat16 as bytes, so that the last dimension is twice as long."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        tensor = array.detach().cpu().contiguous()
        if tensor.dtype == torch.bfloat16 and tensor.ndim:
            return tensor.view(torch.uint8).numpy(), BFLOAT16
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.float()
        array = tensor.numpy()
    if not isinstance(array, np.ndarray):
        raise ConfigError(f"media are of type {type(array).__name__}; give an array of numpy or a tensor of torch")
    little = array.astype(array.dtype.newbyteorder("<"), copy=False) if array.dtype.kind in "fiu" else array
    return little, array.dtype.name


def _checked_fps(fps: float) -> float:
    if not (math.isfinite(fps) and 0.0 < fps <= MAX_FPS):
        raise ConfigError(f"fps is {fps!r}; give frames per second, above 0 and up to {MAX_FPS:g}")
    return float(fps)
