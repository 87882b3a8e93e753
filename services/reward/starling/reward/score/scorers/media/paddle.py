"""Recogniser of text with PaddleOCR, whose versions 2 and 3 are called differently."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from starling.common.errors import ConfigError
from starling.common.raised import describe_raised


class PaddleRecogniser:
    """Reads the text of images.

    Args:
        device: `cpu`, or `cuda` as torch names it.

    Raises:
        ConfigError: PaddleOCR is not installed, or cannot be started.
    """

    def __init__(self, device: str) -> None:
        try:
            engine: Any = importlib.import_module("paddleocr").PaddleOCR
        except ImportError as error:
            raise ConfigError(
                f"Scorer 'ocr': the recogniser `paddleocr` cannot be imported ({error}): pip install paddleocr "
                "paddlepaddle, or set `recogniser` to `bitmap` or your own function."
            ) from None
        self._is_old = not hasattr(engine, "predict")
        on_gpu = device.startswith("cuda")
        version_2 = {"use_gpu": on_gpu, "show_log": False}
        version_3 = {"device": "gpu" if on_gpu else "cpu"}
        try:
            self._engine: Any = engine(lang="en", **(version_2 if self._is_old else version_3))
        except Exception as error:  # it may download models, and has many errors
            raise ConfigError(
                f"Scorer 'ocr': PaddleOCR cannot be started: {describe_raised(error)}: let it download its models "
                "once, outside of the service, and grant their folder in `needs.paths`."
            ) from error

    def __call__(self, image: npt.NDArray[np.uint8]) -> str:
        """Return the text in an image [H, W, 3]: its lines, one after another."""
        blue_first = np.ascontiguousarray(image[:, :, ::-1])
        if self._is_old:
            lines = _lines_of_2(self._engine.ocr(blue_first))
        else:
            lines = _lines_of_3(self._engine.predict(blue_first))
        return "".join(text for text, confidence in lines if confidence > 0.0)


def _lines_of_2(pages: Any) -> Iterator[tuple[str, float]]:
    for page in pages or ():
        for _, (text, confidence) in page or ():
            yield text, confidence


def _lines_of_3(pages: Any) -> Iterator[tuple[str, float]]:
    for page in pages:
        yield from zip(page["rec_texts"], page["rec_scores"], strict=True)
