"""ImageReward (arXiv:2304.05977): how well people would like an image for a prompt, by the package `image-reward`."""

from __future__ import annotations

import importlib
from typing import Any

from starling.reward.score.scorers.models.options import checked_num_frames, frame_means, without_empty


class ImageReward:
    """Scores images, or some frames of videos.

    Args:
        model: name of the model in the package, or its file.
        model_path: folder into which it was downloaded; without it, the package's own.
        med_config: the file `med_config.json` of the model, if `model` is a file.
        device: of the model.
        dtype: of its weights.
        num_frames: how many frames of a video, evenly spaced, are scored; the score is their mean.
        download_path: not used; configuration files of Cosmos-RL have it.
    """

    keys = ("image_reward",)
    media = "pixels"
    batch_size = 8

    def __init__(
        self,
        model: str = "ImageReward-v1.0",
        model_path: str = "",
        med_config: str = "",
        device: str = "cpu",
        dtype: str = "float32",
        num_frames: int = 1,
        download_path: str = "",
    ) -> None:
        self._num_frames = checked_num_frames("image_reward", num_frames)
        self._arguments = {"device": device, **without_empty(download_root=model_path, med_config=med_config)}
        self._name, self._dtype = model, dtype

    def setup(self) -> None:
        """Load the model."""
        torch: Any = importlib.import_module("torch")
        loaded = importlib.import_module("ImageReward").load(self._name, **self._arguments)
        self._model: Any = loaded.eval().requires_grad_(False).to(dtype=getattr(torch, self._dtype))

    def score(self, batch: Any) -> dict[str, list[float]]:
        """Return the score of each sample of a batch."""
        from PIL import Image

        def score(frames: list[Any], owners: list[int]) -> list[float]:
            pairs = zip(frames, owners, strict=True)
            return [float(self._model.score(batch.prompts[index], Image.fromarray(frame))) for frame, index in pairs]

        return {"image_reward": frame_means(batch.pixels, self._num_frames, score)}
