"""Frames of a clip for scorers: some of them, and some of their pixels, so that a long video costs as a short one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from starling.common.errors import ConfigError

Frame = npt.NDArray[np.float32]
"""[H, W, 3], from 0 to 255."""
Clip = npt.NDArray[np.uint8]
"""[T, H, W, 3]."""

WHITE: Final = 255.0
LUMA: Final = np.array([0.299, 0.587, 0.114], np.float32)
"""Shares of red, green and blue in the brightness of a pixel (ITU-R BT.601)."""
MAX_FRAMES: Final = 4096
MAX_SIDE: Final = 1 << 16


class PixelScorer:
    """What the scorers of pixels share: their options, and one score for each clip.

    Args:
        max_frames: limit on the frames of a clip that are looked at, evenly spaced.
        max_side: limit on the rows and columns of a frame that are looked at: every second, every third, and so on.
    """

    media = "pixels"
    batch_size = 4

    def __init__(self, max_frames: int = 32, max_side: int = 512) -> None:
        check_range("max_frames", max_frames, 1, MAX_FRAMES)
        check_range("max_side", max_side, 1, MAX_SIDE)
        self._max_frames, self._max_side = max_frames, max_side

    def score(self, batch: Any) -> dict[str, list[float]]:
        """Return the score of each clip of a batch."""
        pairs = zip(batch.pixels, batch.metadata, strict=True)
        return {"score": [self.measure(clip, metadata) for clip, metadata in pairs]}

    def measure(self, clip: Clip, metadata: dict[str, Any]) -> float:
        """Return the score of one clip, given the metadata of its prompt."""
        raise NotImplementedError

    def frames(self, clip: Clip) -> Iterator[Frame]:
        """Yield the frames that are looked at."""
        return (frame for (frame,) in self.windows(clip, 1))

    def windows(self, clip: Clip, length: int) -> Iterator[tuple[Frame, ...]]:
        """Yield runs of `length` successive frames."""
        step = -(-max(clip.shape[1:3]) // self._max_side)
        for begin in evenly_spaced(len(clip) - length + 1, self._max_frames):
            yield tuple(clip[t, ::step, ::step].astype(np.float32) for t in range(begin, begin + length))


def evenly_spaced(num: int, most: int) -> list[int]:
    """Return at most `most` of the indices below `num`, the first and, from two on, the last among them."""
    if num <= most:
        return list(range(num))
    return [index * (num - 1) // max(1, most - 1) for index in range(most)]


def luma(frame: Frame) -> npt.NDArray[np.float32]:
    """Return the brightness of each pixel, [H, W], from 0 to 255."""
    brightness: npt.NDArray[np.float32] = frame @ LUMA
    return brightness


def mean(values: npt.NDArray[Any] | list[float]) -> float:
    """Return the mean, summed in double precision."""
    return float(np.mean(values, dtype=np.float64))


def check_range(name: str, value: object, least: int, most: int) -> None:
    """Raise ConfigError unless an option is an integer within bounds."""
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(f"{name} is {value!r}; set an integer from {least} to {most}")
