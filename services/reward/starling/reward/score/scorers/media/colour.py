"""Scorers of colours: brightness, distance to a colour, colourfulness."""

from __future__ import annotations

import math
import re
from typing import Any, Final

import numpy as np

from starling.common.errors import ConfigError
from starling.reward.score.scorers.media.frames import WHITE, Clip, Frame, PixelScorer, luma, mean

Colour = tuple[int, int, int]
COLOUR: Final = "colour"
"""Key of a prompt's own colour in its metadata."""
_FARTHEST: Final = WHITE * math.sqrt(3)
_HEX: Final = re.compile(r"#[0-9a-fA-F]{6}")


class Brightness(PixelScorer):
    """Mean brightness: 0 for black, 1 for white."""

    def measure(self, clip: Clip, metadata: dict[str, Any]) -> float:
        """Return the score of one clip."""
        return mean([mean(luma(frame)) for frame in self.frames(clip)]) / WHITE


class TargetColour(PixelScorer):
    """Nearness of the pixels to a colour: 1 if all have it, less by their mean distance in RGB, 0 at the farthest.

    Args:
        colour: as `#ff0000`; without it, each prompt's metadata has its own as `colour`.
        options: of `PixelScorer`.
    """

    def __init__(self, colour: str | None = None, max_frames: int = 32, max_side: int = 512) -> None:
        super().__init__(max_frames, max_side)
        self._colour = None if colour is None else _colour(colour)

    def measure(self, clip: Clip, metadata: dict[str, Any]) -> float:
        """Return the score of one clip. Raises ConfigError for a prompt without a colour."""
        wanted = np.array(self._colour or _colour(metadata.get(COLOUR)), np.float32)
        return 1.0 - mean([_distance(frame, wanted) for frame in self.frames(clip)]) / _FARTHEST


class Colourfulness(PixelScorer):
    """Colourfulness as Hasler and Süsstrunk measure it (2003): 0 for grey, about 110 for what people call extreme."""

    def measure(self, clip: Clip, metadata: dict[str, Any]) -> float:
        """Return the score of one clip."""
        return mean([_colourfulness(frame) for frame in self.frames(clip)])


def _distance(frame: Frame, colour: Frame) -> float:
    difference = frame - colour
    return mean(np.sqrt(np.einsum("hwc,hwc->hw", difference, difference)))


def _colourfulness(frame: Frame) -> float:
    red, green, blue = frame[..., 0], frame[..., 1], frame[..., 2]
    red_green, yellow_blue = red - green, (red + green) / 2 - blue
    spread = math.hypot(float(np.std(red_green)), float(np.std(yellow_blue)))
    return spread + 0.3 * math.hypot(mean(red_green), mean(yellow_blue))


def _colour(text: object) -> Colour:
    """Return red, green and blue. Raises ConfigError."""
    if not isinstance(text, str) or not _HEX.fullmatch(text):
        raise ConfigError(f"the colour is {text!r}; set the option, or the metadata's, to one such as '#ff0000'")
    number = int(text[1:], 16)
    return number >> 16, number >> 8 & 255, number & 255
