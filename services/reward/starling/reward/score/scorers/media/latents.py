"""Scorer of latents: distance to a target, without decoding."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from starling.common.errors import ConfigError

Latents = npt.NDArray[np.float32]
TARGET: Final = "latent_target"
"""Key of a prompt's own target in its metadata."""
DISTANCES: Final = ("squared", "absolute", "cosine")
_SMALLEST: Final = 1e-12


class LatentTarget:
    """Less the distance of a sample's latents to a target: 0 at the target.

    Args:
        file: a `.npy` file with the target, [C, T, H, W] or what numpy broadcasts to it; its folder must be in `needs`.
            Without it, each prompt's metadata has its own as `latent_target`: a number, or lists of numbers in lists.
        distance: the mean of the squared or absolute differences, or 1 less the cosine.
    """

    media = "latents"
    batch_size = 4

    def __init__(self, file: str = "", distance: str = "squared") -> None:
        if distance not in DISTANCES:
            raise ConfigError(f"distance is {distance!r}; set one of {', '.join(DISTANCES)}")
        self._file, self._distance = file, distance
        self._target: Latents | None = None

    def setup(self) -> None:
        """Read the target. Raises ConfigError."""
        if self._file:
            try:
                self._target = _numbers(np.load(self._file, allow_pickle=False))
            except (OSError, ValueError) as error:
                raise ConfigError(f"the latent target {self._file!r} cannot be read: {error}") from None

    def score(self, batch: Any) -> dict[str, list[float]]:
        """Return the score of each sample of a batch."""
        pairs = zip(batch.latents, batch.metadata, strict=True)
        return {"score": [-self._distance_of(latents, metadata) for latents, metadata in pairs]}

    def _distance_of(self, latents: Latents, metadata: dict[str, Any]) -> float:
        target = self._target
        if target is None:
            if TARGET not in metadata:
                raise ValueError(f"the metadata has no {TARGET!r}; add one, or set the option `file`")
            target = _numbers(metadata[TARGET])
        try:
            target = np.broadcast_to(target, latents.shape)
        except ValueError:
            raise ValueError(f"latents of {list(latents.shape)} have a target of {list(target.shape)}") from None
        match self._distance:
            case "squared":
                return float(np.mean(np.square(latents - target), dtype=np.float64))
            case "absolute":
                return float(np.mean(np.abs(latents - target), dtype=np.float64))
            case _:
                return 1.0 - _cosine(latents.ravel(), target.ravel())


def _cosine(one: Latents, other: Latents) -> float:
    lengths = float(np.linalg.norm(one)) * float(np.linalg.norm(other))
    return float(np.dot(one, other)) / max(lengths, _SMALLEST)


def _numbers(value: object) -> Latents:
    """Return numbers as an array. Raises ValueError."""
    try:
        array = np.asarray(value, np.float32)
    except (TypeError, ValueError):
        raise ValueError("the latent target is no array of numbers") from None
    if not np.isfinite(array).all():
        raise ValueError("the latent target has infinities or NaN")
    return array
