"""HPS v2 (arXiv:2306.09341): how well people would like an image for a prompt, by a CLIP model that learnt from them.

The score is the cosine of prompt and image. The published checkpoint is one of open_clip's ViT-H/14, which transformers
has under other names (`open_clip.py`), so that nothing but transformers is needed.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from starling.common.errors import ConfigError
from starling.reward.score.scorers.models.options import checked_num_frames, downloaded_file, frame_means, model_folder

MAX_TOKENS = 77


class Hpsv2:
    """Scores images, or some frames of videos.

    Args:
        model_path: folder of the CLIP model in the form of transformers, and its processor: either one with the weights
            of HPS v2, or, with a `checkpoint`, `laion/CLIP-ViT-H-14-laion2B-s32B-b79K`.
        checkpoint: file with the weights, `HPS_v2.1_compressed.pt` of `xswu/HPSv2`.
        device: of the model.
        dtype: of its weights.
        num_frames: how many frames of a video, evenly spaced, are scored; the score is their mean.
        download_path: folder with `hpsv2/ckpts/HPS_v2.1_compressed.pt`, as Cosmos-RL has it, if there is no checkpoint.
    """

    keys = ("hpsv2",)
    media = "pixels"
    batch_size = 16

    def __init__(
        self,
        model_path: str,
        checkpoint: str = "",
        device: str = "cpu",
        dtype: str = "float32",
        num_frames: int = 1,
        download_path: str = "",
    ) -> None:
        self._folder = model_folder("hpsv2", model_path, "laion/CLIP-ViT-H-14-laion2B-s32B-b79K")
        self._num_frames = checked_num_frames("hpsv2", num_frames)
        self._checkpoint = downloaded_file(download_path, "hpsv2", "ckpts", "HPS_v2.1_compressed.pt")
        if checkpoint:
            self._checkpoint = Path(checkpoint).expanduser()
            if not self._checkpoint.is_file():
                raise ConfigError(
                    f"Scorer 'hpsv2': there is no file {checkpoint!r}; download HPS_v2.1_compressed.pt of xswu/HPSv2."
                )
        self._device, self._dtype = device, dtype

    def setup(self) -> None:
        """Load the model. Raises ConfigError when the checkpoint is of another one."""
        from transformers import CLIPModel, CLIPProcessor

        torch: Any = importlib.import_module("torch")
        self._inference_mode = torch.inference_mode
        self._processor = CLIPProcessor.from_pretrained(str(self._folder), local_files_only=True)
        model = CLIPModel.from_pretrained(str(self._folder), local_files_only=True)
        if self._checkpoint is not None:
            from starling.reward.score.scorers.models.open_clip import clip_weights

            loaded = torch.load(self._checkpoint, map_location="cpu", weights_only=True)
            weights = clip_weights(loaded.get("state_dict", loaded), model)
            model.load_state_dict(weights)
        self._model = model.eval().requires_grad_(False).to(self._device, getattr(torch, self._dtype))
        self._side = model.config.vision_config.image_size

    def score(self, batch: Any) -> dict[str, list[float]]:
        """Return the score of each sample of a batch."""

        def score(frames: list[Any], owners: list[int]) -> list[float]:
            images = [squared(frame, self._side) for frame in frames]
            limits = {"padding": True, "truncation": True, "max_length": MAX_TOKENS}
            inputs = self._processor(text=list(batch.prompts), images=images, return_tensors="pt", **limits)
            inputs = inputs.to(self._device)
            inputs["pixel_values"] = inputs["pixel_values"].to(self._model.dtype)
            with self._inference_mode():
                found = self._model(**inputs)  # its embeddings have length 1
            prompts = found.text_embeds[owners]
            cosines: list[float] = (prompts * found.image_embeds).sum(-1).float().cpu().tolist()
            return cosines

        return {"hpsv2": frame_means(batch.pixels, self._num_frames, score)}


def squared(frame: Any, side: int) -> Any:
    """Return a frame [H, W, 3] as an image of `side` rows and columns, as the model was trained: whole, on black."""
    from PIL import Image

    height, width = frame.shape[:2]
    scale = side / max(height, width)
    rows, columns = max(1, round(height * scale)), max(1, round(width * scale))
    resized = Image.fromarray(frame).resize((columns, rows), Image.Resampling.BICUBIC)
    square = Image.new("RGB", (side, side))
    square.paste(resized, ((side - columns) // 2, (side - rows) // 2))
    return square
