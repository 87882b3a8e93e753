"""GenEval with models of transformers: Mask2Former finds objects, CLIP names their colours."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Final

from starling.reward.score.scorers.models.gen_eval.rules import (
    COLORS,
    TAGS,
    Found,
    Verdict,
    certain_objects,
    judge,
    requirements_of,
)
from starling.reward.score.scorers.models.options import model_folder

NOT_APPLICABLE: Final = -10.0
"""Score of a group that an image does not belong to."""
GROUP: Final = "gen_eval_group"
_LEAST_CONFIDENCE: Final = 0.3
_GREY: Final = 0x99
_TEMPLATES: Final = ("a photo of a {} {}", "a photo of a {}-colored {}", "a photo of a {} object")
_COCO_NAMES: Final = {"computer mouse": "mouse", "computer keyboard": "keyboard", "tv remote": "remote"}
"""Names of COCO's classes that GenEval has others for."""


class GenEval:
    """Scores images; of a video the first frame. What an image must show is in the metadata of its prompt.

    `geneval_tags` has the sample's group, as `counting`, and `geneval_includes` the objects, as
    `[{"class": "dog", "count": 2, "color": "red"}]`, also with `"position": ["left of", 0]`, relative to the objects of
    an earlier entry.

    Args:
        model_path: folder of the detector, `facebook/mask2former-swin-small-coco-instance`.
        clip_path: folder of the CLIP model for colours, `openai/clip-vit-large-patch14`.
        device: of the models.
        dtype: not used: they are small, and thresholds are for float32.
        download_path: not used; configuration files of Cosmos-RL have it.
    """

    keys = ("gen_eval_score", "gen_eval_reward", "gen_eval_strict", *(f"{GROUP}/{tag}" for tag in TAGS))
    media = "pixels"
    batch_size = 4

    def __init__(
        self, model_path: str, clip_path: str, device: str = "cpu", dtype: str = "", download_path: str = ""
    ) -> None:
        self._detector = model_folder("gen_eval", model_path, "facebook/mask2former-swin-small-coco-instance")
        self._clip = model_folder("gen_eval", clip_path, "openai/clip-vit-large-patch14")
        self._device = device

    def setup(self) -> None:
        """Load the models."""
        from transformers import AutoImageProcessor, CLIPModel, CLIPProcessor, Mask2FormerForUniversalSegmentation

        self._torch: Any = importlib.import_module("torch")
        where: dict[str, Any] = {"local_files_only": True}
        self._images = AutoImageProcessor.from_pretrained(str(self._detector), **where)
        self._finder = Mask2FormerForUniversalSegmentation.from_pretrained(str(self._detector), **where)
        self._namer = CLIPModel.from_pretrained(str(self._clip), **where)
        self._processor = CLIPProcessor.from_pretrained(str(self._clip), **where)
        for model in (self._finder, self._namer):
            model.eval().requires_grad_(False).to(self._device)

    def score(self, batch: Any) -> dict[str, list[float]]:
        """Return the scores of each image. Raises ValueError when a prompt's metadata have no valid requirements."""
        rows = [self._row(pixels[0], metadata) for pixels, metadata in zip(batch.pixels, batch.metadata, strict=True)]
        return {key: [row[key] for row in rows] for key in self.keys}

    def _row(self, image: Any, metadata: dict[str, Any]) -> dict[str, float]:
        tag = metadata.get("geneval_tags")
        if tag not in TAGS:
            raise ValueError(f"`geneval_tags` is {tag!r:.100}, not one of {', '.join(TAGS)}")
        requirements = requirements_of(metadata.get("geneval_includes"))
        objects = certain_objects(self._find(image), tag)
        named = {ours: objects.get(_COCO_NAMES.get(ours, ours), []) for ours in {one.name for one in requirements}}
        return scores_of(judge(requirements, named, lambda name, found: self._colors(image, name, found)), tag)

    def _find(self, image: Any) -> list[Found]:
        """Return the objects in an image [H, W, 3]."""
        inputs = self._images(images=[image], input_data_format="channels_last", return_tensors="pt").to(self._device)
        with self._torch.inference_mode():
            outputs = self._finder(**inputs)
        (found,) = self._images.post_process_instance_segmentation(
            outputs, threshold=_LEAST_CONFIDENCE, target_sizes=[image.shape[:2]], return_binary_maps=True
        )
        objects = list[Found]()
        for number, segment in enumerate(found["segments_info"]):
            mask = found["segmentation"][number].cpu().numpy() > 0
            if mask.any():
                name = self._finder.config.id2label[segment["label_id"]]
                objects.append(Found(name, float(segment["score"]), box_of(mask), mask))
        return objects

    def _colors(self, image: Any, name: str, found: Sequence[Found]) -> list[str]:
        """Return the colour of each object: that whose descriptions are most similar to its picture."""
        if not found:
            return []
        pictures = [cut_out(image, one) for one in found]
        texts = [template.format(color, name) for color in COLORS for template in _TEMPLATES]
        inputs = self._processor(
            text=texts, images=pictures, padding=True, input_data_format="channels_last", return_tensors="pt"
        ).to(self._device)
        with self._torch.inference_mode():
            outputs = self._namer(**inputs)  # its embeddings have length 1
        by_color = outputs.text_embeds.view(len(COLORS), len(_TEMPLATES), -1).mean(1)
        by_color = by_color / by_color.norm(dim=-1, keepdim=True)
        return [COLORS[int(index)] for index in (outputs.image_embeds @ by_color.T).argmax(-1)]


def scores_of(verdict: Verdict, tag: str) -> dict[str, float]:
    """Return the scores of an image of the group `tag`, by key."""
    groups = {f"{GROUP}/{one}": float(verdict.is_correct) if one == tag else NOT_APPLICABLE for one in TAGS}
    return {
        "gen_eval_score": verdict.score,
        "gen_eval_reward": float(verdict.is_correct),
        "gen_eval_strict": float(verdict.is_strict),
        **groups,
    }


def box_of(mask: Any) -> tuple[float, float, float, float]:
    """Return the smallest box around a mask [H, W] that is not empty: left, top, right, bottom."""
    rows, columns = mask.any(axis=1).nonzero()[0], mask.any(axis=0).nonzero()[0]
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)


def cut_out(image: Any, found: Found) -> Any:
    """Return an object on grey, [h, w, 3]."""
    picture = image.copy()
    picture[~found.mask] = _GREY
    left, top, right, bottom = map(int, found.box)
    return picture[top:bottom, left:right]
