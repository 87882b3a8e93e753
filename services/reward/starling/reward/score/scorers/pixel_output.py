"""Place of a sample's pixels in memory of the service, as the worker that decodes latents has it."""

from __future__ import annotations

import os
from io import FileIO
from typing import Any

from starling.reward.core.media import MediaForm


class PixelOutput:
    """Memory for the pixels of one sample.

    Args:
        file: the memory.
        offset: where the pixels begin in it, in bytes.
        form: what they are.
    """

    def __init__(self, file: FileIO, offset: int, form: MediaForm) -> None:
        self._file, self._offset, self._form = file, offset, form

    def write(self, pixels: Any) -> None:
        """Write pixels, an array of uint8 in C order. Raises ValueError when they are not what is expected."""
        view = memoryview(pixels)
        if view.format != "B" or view.shape != self._form.shape or not view.c_contiguous:
            raise ValueError(
                f"the decoder made pixels of shape {list(view.shape or ())} and type {view.format!r}, and its "
                f"configuration says uint8 of {list(self._form.shape)}"
            )
        rest, offset = view.cast("B"), self._offset
        while rest:
            written = os.pwrite(self._file.fileno(), rest, offset)
            rest, offset = rest[written:], offset + written
