"""VideoAlign (arXiv:2501.13918), the video reward of DanceGRPO: quality of picture and motion, agreement with the text.

Its code is no package: clone https://github.com/KwaiVGI/VideoAlign, install its requirements, and give its folder. It
reads video files, so each video is written as one without loss.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from starling.common.errors import ConfigError
from starling.reward.score.scorers.models.options import check_range, model_folder

_KEYS: Final = {"vq_reward": "VQ", "mq_reward": "MQ", "ta_reward": "TA", "overall_reward": "Overall"}
"""Names of the scores, and those of the code."""


class VideoAlign:
    """Scores videos.

    Args:
        model_path: folder of the model, `KwaiVGI/VideoReward` on the Hugging Face Hub.
        code_path: folder of the code, with `inference.py`; without it, `download_path`.
        device: of the model.
        dtype: of its weights.
        default_fps: frame rate of videos of which it is not known.
        normalised: whether scores are relative to the mean and deviation that the authors give.
        download_path: folder of the code, as in configuration files of Cosmos-RL.
    """

    keys = tuple(_KEYS)
    media = "pixels"
    batch_size = 1

    def __init__(
        self,
        model_path: str,
        code_path: str = "",
        device: str = "cpu",
        dtype: str = "bfloat16",
        default_fps: float = 16.0,
        normalised: bool = True,
        download_path: str = "",
    ) -> None:
        self._folder = model_folder("dance_grpo", model_path, "KwaiVGI/VideoReward")
        self._code = Path(code_path or download_path).expanduser().absolute()
        if not (self._code / "inference.py").is_file():
            raise ConfigError(
                f"Scorer 'dance_grpo': {str(self._code)!r} has no inference.py; clone "
                "https://github.com/KwaiVGI/VideoAlign and give its folder as code_path."
            )
        check_range("dance_grpo", "default_fps", default_fps, 0.01, 1000.0)
        self._device, self._dtype = device, dtype
        self._default_fps, self._normalised = default_fps, normalised

    def setup(self) -> None:
        """Import the code and load the model."""
        torch: Any = importlib.import_module("torch")
        sys.path.insert(0, str(self._code))  # its modules import each other by their names
        inference = importlib.import_module("inference")
        self._model: Any = inference.VideoVLMRewardInference(
            str(self._folder), device=self._device, dtype=getattr(torch, self._dtype)
        )

    def score(self, batch: Any) -> dict[str, list[float]]:
        """Return the scores of each video."""
        with tempfile.TemporaryDirectory() as folder:
            files = [str(Path(folder) / f"{number}.avi") for number in range(len(batch))]
            for file, pixels, fps in zip(files, batch.pixels, batch.fps, strict=True):
                write_video(file, pixels, fps or self._default_fps)
            found = self._model.reward(files, list(batch.prompts), use_norm=self._normalised)
        return {key: [float(one[name]) for one in found] for key, name in _KEYS.items()}


def write_video(file: str, pixels: Any, fps: float) -> None:
    """Write pixels [T, H, W, 3] as a video without loss (FFV1). Raises RuntimeError when OpenCV cannot."""
    cv2: Any = importlib.import_module("cv2")
    height, width = pixels.shape[1:3]
    writer = cv2.VideoWriter(file, cv2.VideoWriter_fourcc(*"FFV1"), fps, (width, height))
    try:
        if not writer.isOpened():
            raise RuntimeError("OpenCV cannot write FFV1 videos here; install opencv-python-headless with FFmpeg")
        for frame in pixels:
            writer.write(frame[:, :, ::-1].copy())  # it has blue first
    finally:
        writer.release()
