"""Scorer of written text: whether what a recogniser reads in an image is what the prompt has between quotes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from starling.common.errors import ConfigError
from starling.common.importing import import_object
from starling.reward.score.scorers.media.font import read
from starling.reward.score.scorers.media.frames import MAX_FRAMES, check_range, evenly_spaced, mean
from starling.reward.score.scorers.media.paddle import PaddleRecogniser

Recogniser = Callable[[npt.NDArray[np.uint8]], str]
"""From an image [H, W, 3] to its text."""

PADDLE: Final = "paddleocr"
BITMAP: Final = "bitmap"
"""The recogniser of `font`."""
MAX_TEXT: Final = 512
"""Characters of a text that are compared; the time grows with their square."""
_QUOTED: Final = re.compile(r'"([^"]*)"')


class WrittenText:
    """Agreement of the text in an image with the text between the first double quotes of the prompt.

    1 if the image contains it, whatever its capitals and spaces; else 1 less the edits (Levenshtein) from one to the
    other for each character of the prompt's, at least 0. For a clip the mean over its frames.

    Args:
        recogniser: `paddleocr`, where it is installed; `bitmap`, which reads one fixed font (`media/font.py`); or your
            own, as `module:function` or `path/to/file.py:function`: from an array [H, W, 3] of uint8 to a text.
        max_frames: limit on the frames of a clip that are read, evenly spaced.
        device: of `paddleocr`.
        dtype, model_path, download_path: not used; configuration files of Cosmos-RL have them.
    """

    media = "pixels"
    keys = ("ocr_reward",)
    batch_size = 4

    def __init__(
        self,
        recogniser: str = PADDLE,
        max_frames: int = 4,
        device: str = "cpu",
        dtype: str = "",
        model_path: str = "",
        download_path: str = "",
    ) -> None:
        check_range("max_frames", max_frames, 1, MAX_FRAMES)
        self._max_frames = max_frames
        self._recogniser, self._device = recogniser, device
        self._recognise: Recogniser = read if recogniser in (BITMAP, PADDLE) else _own(recogniser)

    def setup(self) -> None:
        """Load the recogniser. Raises ConfigError when its package is not installed."""
        if self._recogniser == PADDLE:
            self._recognise = PaddleRecogniser(self._device)

    def score(self, batch: Any) -> dict[str, list[float]]:
        """Return the score of each clip of a batch."""
        pairs = zip(batch.pixels, batch.prompts, strict=True)
        return {"ocr_reward": [self._agreement(clip, quoted(prompt)) for clip, prompt in pairs]}

    def _agreement(self, clip: npt.NDArray[np.uint8], target: str) -> float:
        frames = evenly_spaced(len(clip), self._max_frames)
        return mean([agreement(self._recognise(clip[t]), target) for t in frames])


def quoted(prompt: str) -> str:
    """Return the text between the first double quotes. Raises ValueError when there is none."""
    found = _QUOTED.search(prompt.translate({ord("“"): '"', ord("”"): '"'}))
    if found is None or not _plain(found[1]):
        raise ValueError('the prompt has no text between double quotes, as in: a sign that says "OPEN"')
    return found[1]


def agreement(text: str, target: str) -> float:
    """Return how well a text agrees with the target: 1 if it contains it, else less by their edit distance."""
    text, target = _plain(text)[:MAX_TEXT], _plain(target)[:MAX_TEXT]
    if target in text:
        return 1.0
    return max(0.0, 1.0 - edit_distance(text, target) / len(target))


def edit_distance(one: str, other: str) -> int:
    """Return the fewest insertions, deletions and replacements of characters from one text to the other."""
    row = list(range(len(other) + 1))
    for number, character in enumerate(one, 1):
        diagonal, row[0] = row[0], number
        for column, wanted in enumerate(other, 1):
            cost = min(row[column] + 1, row[column - 1] + 1, diagonal + (character != wanted))
            diagonal, row[column] = row[column], cost
    return row[-1]


def _plain(text: str) -> str:
    """Return a text without spaces and capitals."""
    return "".join(text.casefold().split())


def _own(name: str) -> Recogniser:
    """Import a user's recogniser. Raises ConfigError."""
    found = import_object(name, "Recogniser")
    if not callable(found):
        raise ConfigError(f"the recogniser {name!r} is a {type(found).__name__}; give a function, or `{BITMAP}`")
    recogniser: Recogniser = found
    return recogniser
