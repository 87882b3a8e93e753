"""Scorers of pixels and latents, for tests of decoding with real workers."""

from __future__ import annotations

import zlib
from typing import Any


class Digest:
    """Returns a checksum of the pixels, their number of frames, and the frame rate."""

    media = "pixels"
    batch_size = 4
    keys = ("digest", "frames", "fps")

    def score(self, batch: Any) -> dict[str, list[float]]:
        assert all(clip.dtype == "uint8" and not clip.flags.writeable for clip in batch.pixels)
        return {
            "digest": [float(zlib.crc32(clip)) for clip in batch.pixels],
            "frames": [float(len(clip)) for clip in batch.pixels],
            "fps": list(batch.fps),
        }


class Darkest:
    """Compares the clips of a group: 1 for the darkest one."""

    media = "pixels"
    scope = "groupwise"

    def score(self, batch: Any) -> dict[str, list[float]]:
        means = [float(clip.mean()) for clip in batch.pixels]
        return {"score": [float(one == min(means)) for one in means]}


class FirstLatent:
    """Returns the first number of the latents."""

    media = "latents"

    def score(self, batch: Any) -> dict[str, list[float]]:
        assert batch.pixels == ()
        assert batch.outputs == ()
        return {"score": [float(latents.flat[0]) for latents in batch.latents]}
