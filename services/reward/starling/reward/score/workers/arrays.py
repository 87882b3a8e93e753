"""Media as numpy arrays in a worker process: its mappings of the service's buffers.

It is imported only by workers of scorers that read media.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from io import FileIO

import numpy as np
import numpy.typing as npt

from starling.reward.core.media import ITEM_BYTES, MediaForm
from starling.reward.score.scorers.batch import MediaArray
from starling.reward.score.scorers.pixel_output import PixelOutput
from starling.reward.score.workers.protocol import PlacedMedia


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
    stored = "<u2" if form.dtype == "bfloat16" else np.dtype(form.dtype).newbyteorder("<")
    flat = np.frombuffer(buffer, stored, num, offset)
    if form.dtype == "bfloat16":  # the upper half of a float32
        flat = (flat.astype("<u4") << 16).view("<f4")
    elif form.kind == "latents":
        flat = flat.astype("<f4", copy=False)
    flat.flags.writeable = False
    return flat.reshape(form.shape)
