"""Scorers of how much detail frames have: sharpness and compressibility."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from starling.reward.score.scorers.media.frames import Clip, Frame, PixelScorer, check_range, luma, mean


class Sharpness(PixelScorer):
    """Variance of the Laplacian of the brightness: 0 for a plain area, hundreds for sharp photographs."""

    def measure(self, clip: Clip, metadata: dict[str, Any]) -> float:
        """Return the score of one clip. Raises ValueError for frames of less than three rows or columns."""
        if min(clip.shape[1:3]) < 3:
            raise ValueError(f"frames of {clip.shape[1]} x {clip.shape[2]} have no Laplacian; send 3 x 3 or more")
        return mean([_laplacian_variance(frame) for frame in self.frames(clip)])


class JpegCompressibility(PixelScorer):
    """Less the size of the frames as JPEG by their size in memory: near 0 for plain frames, lower the more detail.

    A negative weight rewards detail.

    Args:
        quality: of JPEG, from 1 to 95.
        options: of `PixelScorer`.
    """

    def __init__(self, quality: int = 95, max_frames: int = 8, max_side: int = 1 << 16) -> None:
        super().__init__(max_frames, max_side)
        check_range("quality", quality, 1, 95)
        self._quality = quality

    def setup(self) -> None:
        """Import the encoder."""
        from PIL import Image

        self._from_array = Image.fromarray

    def measure(self, clip: Clip, metadata: dict[str, Any]) -> float:
        """Return the score of one clip."""
        return -mean([self._jpeg_bytes(frame) / frame.size for frame in self.frames(clip)])

    def _jpeg_bytes(self, frame: Frame) -> int:
        stream = io.BytesIO()
        self._from_array(frame.astype(np.uint8)).save(stream, format="JPEG", quality=self._quality)
        return stream.tell()


def _laplacian_variance(frame: Frame) -> float:
    x = luma(frame)
    laplacian = x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:] - 4 * x[1:-1, 1:-1]
    return float(np.var(laplacian, dtype=np.float64))
