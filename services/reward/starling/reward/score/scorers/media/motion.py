"""Scorers of what changes between frames: motion, smoothness, flicker, consistency with a first frame."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from starling.reward.score.scorers.media.frames import WHITE, Clip, Frame, PixelScorer, luma, mean

IMAGE: Final = "image"
"""Key of a prompt's image in its metadata, the file in base64."""
MAX_IMAGE_PIXELS: Final = 1 << 25


class Motion(PixelScorer):
    """Mean change of the pixels from one frame to the next: 0 for a still image, 1 for black and white in turn."""

    def measure(self, clip: Clip, metadata: dict[str, Any]) -> float:
        """Return the score of one clip."""
        changes = [mean(np.abs(after - before)) for before, after in self.windows(clip, 2)]
        return mean(changes) / WHITE if changes else 0.0


class Smoothness(PixelScorer):
    """How steadily pixels change: 1 less their mean second difference, 0 for black and white in turn."""

    def measure(self, clip: Clip, metadata: dict[str, Any]) -> float:
        """Return the score of one clip. Raises ValueError for one of fewer than three frames."""
        bends = [mean(np.abs(after - 2 * now + before)) for before, now, after in self.windows(clip, 3)]
        if not bends:
            raise ValueError(f"a clip of {len(clip)} frames has no second difference; send three or more")
        return 1.0 - mean(bends) / (2 * WHITE)


class Flicker(PixelScorer):
    """Mean change of the brightness of whole frames: 0 for a steady light, 1 for black and white in turn."""

    def measure(self, clip: Clip, metadata: dict[str, Any]) -> float:
        """Return the score of one clip."""
        levels = ((mean(luma(before)), mean(luma(after))) for before, after in self.windows(clip, 2))
        changes = [abs(after - before) for before, after in levels]
        return mean(changes) / WHITE if changes else 0.0


class FirstFrameConsistency(PixelScorer):
    """Nearness of the frames to the prompt's image, in its metadata as `image`, or else to the first frame.

    1 if all equal it, less by the mean difference of their pixels. The image is a file of PNG or JPEG in base64; it is
    scaled to the size of the frames.
    """

    def measure(self, clip: Clip, metadata: dict[str, Any]) -> float:
        """Return the score of one clip. Raises ValueError for an image that cannot be read."""
        own = metadata.get(IMAGE)
        if own is None:
            frames = self.frames(clip)
            reference = next(frames)
        else:
            reference = next(self.frames(_image(own, clip.shape[2], clip.shape[1])))
            frames = self.frames(clip)
        differences = list(_differences(frames, reference))
        return 1.0 - mean(differences) / WHITE if differences else 1.0


def _differences(frames: Iterator[Frame], reference: Frame) -> Iterator[float]:
    return (mean(np.abs(frame - reference)) for frame in frames)


def _image(text: object, width: int, height: int) -> Clip:
    """Return an image as a clip of one frame, scaled. Raises ValueError."""
    from PIL import Image  # only where a prompt has an image

    if not isinstance(text, str):
        raise ValueError(f"the metadata's image is a {type(text).__name__}; send a file of PNG or JPEG in base64")
    try:
        with Image.open(io.BytesIO(base64.b64decode(text, validate=True)), formats=("PNG", "JPEG")) as image:
            if image.width * image.height > MAX_IMAGE_PIXELS:
                raise ValueError(f"it has {image.width} x {image.height} pixels, above {MAX_IMAGE_PIXELS}")
            scaled = image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
    except (binascii.Error, OSError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"the metadata's image cannot be read ({error}); send PNG or JPEG in base64") from None
    return np.asarray(scaled, np.uint8)[None]
