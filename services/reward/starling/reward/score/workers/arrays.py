"""Media as numpy arrays: a worker's mappings of the service's buffers, and numbers of latents in their stored form.

It is imported only by workers of scorers that read media, and where a service has media.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from io import FileIO
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from starling.reward.core.media import ITEM_BYTES, MediaForm
from starling.reward.score.scorers.batch import MediaArray
from starling.reward.score.scorers.pixel_output import PixelOutput
from starling.reward.score.workers.protocol import PlacedMedia

_EXPONENT: Final = {"float16": 0x7C00, "bfloat16": 0x7F80}
"""Bits that all are set in infinity and NaN."""
_CHECKED_NUMBERS: Final = 1 << 20
"""At a time."""


def stored_dtype(dtype: str) -> np.dtype[Any]:
    """Return numpy's dtype of stored numbers: that of the bits for bfloat16, which numpy has not."""
    return np.dtype("<u2") if dtype == "bfloat16" else np.dtype(dtype).newbyteorder("<")


def as_float32(stored: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float32]:
    """Return the numbers of latents, given as they are stored; without a copy if they are float32."""
    if dtype == "bfloat16":  # the upper half of a float32
        return (stored.astype("<u4") << 16).view("<f4")
    return stored.astype("<f4", copy=False)


def are_finite(stored: npt.NDArray[Any], dtype: str) -> bool:
    """Whether all numbers of latents are finite, given flat and as they are stored."""
    exponent = _EXPONENT.get(dtype)
    for begin in range(0, len(stored), _CHECKED_NUMBERS):
        some = stored[begin : begin + _CHECKED_NUMBERS]
        if exponent is None:
            is_bad = not np.isfinite(some).all()
        else:
            is_bad = bool(((some.view("<u2") & exponent) == exponent).any())
        if is_bad:
            return False
    return True


def map_buffers(descriptors: Sequence[int]) -> tuple[mmap.mmap, ...]:
    """Return mappings of buffers, read-only, and close the descriptors."""
    try:
        # Not shared: before Linux 6.7 a buffer that is sealed against writing could not be mapped so.
        return tuple(mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) for fd in descriptors)
    finally:
        for fd in descriptors:
            os.close(fd)


def open_outputs(places: Sequence[PlacedMedia], descriptors: Sequence[int]) -> tuple[PixelOutput, ...]:
    """Return where the pixels of samples are to be written, with copies of the descriptors, which stay open for it."""
    files = {number: FileIO(os.dup(descriptors[number]), "r+") for number in {p.buffer for p in places}}
    return tuple(PixelOutput(files[placed.buffer], placed.offset, placed.form) for placed in places)


def media_array(placed: PlacedMedia, buffers: Sequence[mmap.mmap], output: PixelOutput | None) -> MediaArray:
    """Return the media of a sample: pixels in the buffer itself, latents as float32."""
    array = array_in(buffers[placed.buffer], placed.offset, placed.form)
    return MediaArray(array, placed.form.fps, output)


def array_in(
    buffer: mmap.mmap | bytes, offset: int, form: MediaForm
) -> npt.NDArray[np.uint8] | npt.NDArray[np.float32]:
    """Return the media of one sample at `offset`, read-only; without a copy if they are uint8 or float32."""
    num = form.size_bytes // ITEM_BYTES[form.dtype]
    flat = np.frombuffer(buffer, stored_dtype(form.dtype), num, offset)
    if form.kind == "latents":
        flat = as_float32(flat, form.dtype)
    flat.flags.writeable = False
    return flat.reshape(form.shape)
