"""HPS v3 (arXiv:2508.03789): how well people would like an image for a prompt, by the authors' package `hpsv3`.

The model answers with the mean and the deviation of its estimate; the score is the mean.
"""

from __future__ import annotations

import importlib
from typing import Any

from starling.reward.score.scorers.models.options import checked_num_frames, downloaded_file, frame_means, without_empty


class Hpsv3:
    """Scores images, or some frames of videos.

    Args:
        model_path: its checkpoint, `HPSv3.safetensors` of `MizzenAI/HPSv3`; without it, the package's own way.
        config_path: a configuration file of the package; without it, the package's own.
        device: of the model.
        dtype: not used: the package chooses it; configuration files of Cosmos-RL have it.
        num_frames: how many frames of a video, evenly spaced, are scored; the score is their mean.
        download_path: folder with `hpsv3/HPSv3.safetensors`, as Cosmos-RL has it, if there is no `model_path`.
    """

    keys = ("hpsv3",)
    media = "pixels"
    batch_size = 8

    def __init__(
        self,
        model_path: str = "",
        config_path: str = "",
        device: str = "cpu",
        dtype: str = "",
        num_frames: int = 1,
        download_path: str = "",
    ) -> None:
        self._num_frames = checked_num_frames("hpsv3", num_frames)
        checkpoint = model_path or str(downloaded_file(download_path, "hpsv3", "HPSv3.safetensors") or "")
        self._arguments = {"device": device, **without_empty(checkpoint_path=checkpoint, config_path=config_path)}

    def setup(self) -> None:
        """Load the model."""
        self._model: Any = importlib.import_module("hpsv3").HPSv3RewardInferencer(**self._arguments)

    def score(self, batch: Any) -> dict[str, list[float]]:
        """Return the score of each sample of a batch."""
        from PIL import Image

        def score(frames: list[Any], owners: list[int]) -> list[float]:
            images = [Image.fromarray(frame) for frame in frames]
            found = self._model.reward(prompts=[batch.prompts[index] for index in owners], image_paths=images)
            return [float(one[0]) for one in found]

        return {"hpsv3": frame_means(batch.pixels, self._num_frames, score)}
