"""Scorers that read media, for tests with real workers."""

from __future__ import annotations

import os
import sys
import time
from typing import Any


class Pixels:
    """Checks what it gets, and returns the sum of the pixels of each clip, and its frame rate."""

    media = "pixels"
    batch_size = 4
    keys = ("sum", "fps", "batch")

    def score(self, batch: Any) -> dict[str, list[float]]:
        assert len(batch.pixels) == len(batch.fps) == len(batch)
        assert batch.latents == ()
        for clip in batch.pixels:
            assert clip.dtype == "uint8"
            assert clip.ndim == 4
            assert not clip.flags.writeable
        sums = [float(clip.sum()) for clip in batch.pixels]
        return {"sum": sums, "fps": list(batch.fps), "batch": [len(batch)] * len(batch)}


class Latents:
    """Returns the first number of each sample's latents."""

    media = "latents"
    batch_size = 8

    def score(self, batch: Any) -> dict[str, list[float]]:
        assert batch.pixels == ()
        for latents in batch.latents:
            assert latents.dtype == "float32"
            assert not latents.flags.writeable
        return {"score": [float(latents.ravel()[0]) for latents in batch.latents]}


class TokenIds:
    """Returns the sum of the token ids of each completion."""

    media = "token_ids"
    batch_size = 8

    def score(self, batch: Any) -> dict[str, list[float]]:
        assert batch.pixels == batch.latents == batch.fps == ()
        for ids in batch.token_ids:
            assert ids.dtype == "int32"
            assert not ids.flags.writeable
        return {"score": [float(ids.sum(dtype="int64")) for ids in batch.token_ids]}


class Brightest:
    """Compares the clips of a group."""

    media = "pixels"
    scope = "groupwise"

    def score(self, batch: Any) -> dict[str, list[float]]:
        sums = [float(clip.sum()) for clip in batch.pixels]
        return {"score": [float(one == max(sums)) for one in sums]}


class Acting:
    """Does what a completion says, and else returns the sum of its pixels."""

    media = "pixels"

    def score(self, batch: Any) -> dict[str, list[float]]:
        (text,), (clip,) = batch.completions, batch.pixels
        match text.split():
            case ["exit"]:
                os._exit(3)
            case ["exit-once", file]:
                if not os.path.exists(file):
                    with open(file, "x"):
                        pass
                    os._exit(3)
            case ["hang"]:
                time.sleep(1000.0)
            case ["write"]:
                clip.flags.writeable = True
        return {"score": [float(clip.sum())]}


class Keeping:
    """Keeps what it is given, as no scorer should."""

    media = "pixels"

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def score(self, batch: Any) -> dict[str, list[float]]:
        self.kept += batch.pixels
        return {"score": [float(sum(int(clip.sum()) for clip in self.kept))]}


class WithoutNumpy:
    """Its worker cannot import numpy."""

    media = "pixels"

    def setup(self) -> None:
        sys.modules["numpy"] = None  # type: ignore[assignment]

    def score(self, batch: Any) -> dict[str, list[float]]:
        return {"score": [1.0] * len(batch)}


def has_numpy(completion: str, reference: str, prompt_text: str, metadata: dict[str, Any]) -> bool:
    return "numpy" in sys.modules
