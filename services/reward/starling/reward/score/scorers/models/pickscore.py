"""PickScore (arXiv:2305.01569): which image people would pick for a prompt, by a CLIP model that learnt from choices.

The score is the model's similarity of prompt and image, times its temperature, over 26, so that most are near 1.
"""

from __future__ import annotations

from typing import Any, Final

from starling.reward.score.scorers.models.options import checked_num_frames, model_folder

SCALE: Final = 26.0
MAX_TOKENS: Final = 77


class PickScore:
    """Scores images, or some frames of videos.

    Args:
        model_path: folder of the model, `yuvalkirstain/PickScore_v1` on the Hugging Face Hub.
        processor_path: folder of its processor, `laion/CLIP-ViT-H-14-laion2B-s32B-b79K`; without it, `model_path`.
        device: of the model.
        dtype: of its weights.
        num_frames: how many frames of a video, evenly spaced, are scored; the score is their mean.
        download_path: not used; configuration files of Cosmos-RL have it.
    """

    keys = ("pickscore",)
    media = "pixels"
    batch_size = 16

    def __init__(
        self,
        model_path: str,
        processor_path: str = "",
        device: str = "cpu",
        dtype: str = "float32",
        num_frames: int = 1,
        download_path: str = "",
    ) -> None:
        self._folder = model_folder("pickscore", model_path, "yuvalkirstain/PickScore_v1")
        self._processor_folder = (
            model_folder("pickscore", processor_path, "laion/CLIP-ViT-H-14-laion2B-s32B-b79K")
            if processor_path
            else self._folder
        )
        self._num_frames = checked_num_frames("pickscore", num_frames)
        self._device, self._dtype = device, dtype

    def setup(self) -> None:
        """Load the model."""
        from transformers import CLIPModel, CLIPProcessor

        where: dict[str, Any] = {"local_files_only": True}
        self._processor = CLIPProcessor.from_pretrained(str(self._processor_folder), **where)
        model = CLIPModel.from_pretrained(str(self._folder), dtype=self._dtype, **where)
        self._model = model.eval().requires_grad_(False).to(self._device)

    def score(self, batch: Any) -> dict[str, list[float]]:
        """Return the score of each sample of a batch."""
        frames, owners = [], []
        for index, pixels in enumerate(batch.pixels):
            for number in range(self._num_frames if len(pixels) > 1 else 1):
                frames.append(pixels[number * len(pixels) // self._num_frames])
                owners.append(index)
        inputs = self._processor(
            text=list(batch.prompts),
            images=frames,
            padding=True,
            truncation=True,
            max_length=MAX_TOKENS,
            input_data_format="channels_last",
            return_tensors="pt",
        ).to(self._device)
        inputs["pixel_values"] = inputs["pixel_values"].to(self._model.dtype)
        similarities = self._model(**inputs).logits_per_image.float().cpu().numpy() / SCALE  # [frame, prompt]
        sums, counts = [0.0] * len(batch), [0] * len(batch)
        for row, index in enumerate(owners):
            sums[index] += float(similarities[row, index])
            counts[index] += 1
        return {"pickscore": [total / count for total, count in zip(sums, counts, strict=True)]}
