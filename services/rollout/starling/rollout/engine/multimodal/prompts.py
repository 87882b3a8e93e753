"""Prompt encoder for the Qwen family of vision-language models: token ids, pixels and positions.

Every prompt is encoded once, here. The policy trains on exactly these tensors, so it needs neither processor nor
tokenizer, and its log-probabilities of a completion are those of the rollout.

Images go through the model's own image processor. Videos are cut into patches here, with all of their frames: the
video processors of transformers need torchvision, and sample frames by a frame rate that a folder of frames lacks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch

from starling.algo.architecture import TIMESTAMPED, auto_class, media_inputs
from starling.algo.media import media_problem, pixel_problem, placeholder_ids
from starling.algo.text import check_media, encode_prompt, encode_text, prompt_text
from starling.common.errors import ConfigError
from starling.common.wire.messages import Media, MediaInputs, Prompt
from starling.rollout.engine.base import RequestError
from starling.rollout.engine.multimodal.loading import MediaBudget, open_image, open_video

if TYPE_CHECKING:
    from PIL import Image

Arrays = dict[str, npt.NDArray[Any]]

_DEFAULT_FPS: Final = 2.0


class PromptEncoder:
    """Converts prompts into the token ids and tensors that the model of an engine takes."""

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        folder: Path,
        *,
        max_media_bytes: int,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Create an encoder.

        Args:
            config: the model's configuration.
            tokenizer: the model's tokenizer; its chat template must support images if the model does.
            folder: model folder in Hugging Face format, with the configuration of its processors.
            max_media_bytes: maximum bytes of the images and videos of one prompt, decoded and as tensors.
            tools: functions that the model may call, for the chat template.

        Raises:
            ConfigError: the model takes images, and the folder has no usable image processor.
        """
        self._tokenizer, self._max_bytes, self._tools = tokenizer, max_media_bytes, tuple(tools)
        inputs = media_inputs(config)
        self._vision = _Vision(config, inputs, tokenizer, folder, self._tools) if inputs is not None else None

    def encode(self, prompt: Prompt) -> tuple[list[int], Arrays]:
        """Return the token ids that the model continues, and the tensors of the prompt's media (see `TrainGroup`).

        Raises:
            ConfigError: the prompt's media do not match its text, the model takes no media, or the tokenizer has no
                chat template.
            RequestError: an image does not decode or does not exist, the media exceed `max_media_bytes`, or the model
                cannot take what their processor makes of them.
        """
        if self._vision is None:
            return encode_prompt(self._tokenizer, prompt, self._tools), {}
        check_media(prompt)
        if not prompt.media:
            return encode_prompt(self._tokenizer, prompt, self._tools), {}
        budget = MediaBudget(self._max_bytes)
        ids, tensors = self._vision.encode(prompt, budget)
        budget.check(sum(array.nbytes for array in tensors.values()))
        return ids, tensors

    def release(self) -> None:
        """Free device memory: it has none."""


class _Vision:
    """The part of a `PromptEncoder` for prompts with media."""

    def __init__(
        self, config: Any, inputs: MediaInputs, tokenizer: Any, folder: Path, tools: Sequence[Mapping[str, Any]]
    ) -> None:
        from transformers import AutoImageProcessor

        self._config, self._inputs, self._tokenizer, self._tools = config, inputs, tokenizer, tools
        with torch.device("meta"):  # allocates nothing; only the position rule of the class is used
            self._positions = auto_class(config).from_config(config).base_model.get_rope_index
        self._tokens = {
            kind: str(tokenizer.convert_ids_to_tokens(token))
            for kind, token in zip(("image", "video"), placeholder_ids(inputs).values(), strict=True)
        }
        try:
            # One implementation everywhere: pixels must not depend on whether torchvision is installed.
            self._images = AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
        except (OSError, ValueError, ImportError) as error:
            reason = str(error).strip().split("\n", 1)[0].rstrip(".")
            raise ConfigError(f"the image processor of {str(folder)!r} cannot be loaded: {reason}") from error
        self._frames = FrameProcessor.read(folder, per_video=config.model_type in TIMESTAMPED)

    def encode(self, prompt: Prompt, budget: MediaBudget) -> tuple[list[int], Arrays]:
        """Return the token ids of `prompt`, and its tensors by name."""
        tensors: Arrays = {}
        texts: dict[str, list[str]] = {"image": [], "video": []}
        if images := [media for media in prompt.media if media.kind == "image"]:
            tensors |= self._encode_images(images, budget)
            texts["image"] = [self._tokens["image"] * self._num_tokens(grid) for grid in tensors["image_grid_thw"]]
        videos = [media for media in prompt.media if media.kind == "video"]
        if videos:
            opened = [open_video(media, budget) for media in videos]
            tensors |= self._encode_videos(opened, budget)
            texts["video"] = [
                self._video_text(grid, media.fps or _DEFAULT_FPS, len(frames))
                for grid, media, frames in zip(tensors["video_grid_thw"], videos, opened, strict=True)
            ]
        text = prompt_text(self._tokenizer, prompt, self._tools)
        for kind, replacements in texts.items():
            text = self._expand(text, kind, replacements)
        ids = encode_text(self._tokenizer, text)
        seconds = [self._frames.temporal_patch_size / (media.fps or _DEFAULT_FPS) for media in videos]
        tensors["position_ids"] = self._position_ids(ids, tensors, seconds)
        problem = media_problem(tensors, np.array(ids, np.int32), self._inputs) or pixel_problem(tensors)
        if problem:
            raise RequestError(
                f"the model cannot take the images or videos of the prompt: {problem}; check preprocessor_config.json "
                "of the model, and the length and fps of videos"
            )
        return ids, tensors

    def _encode_images(self, images: Sequence[Media], budget: MediaBudget) -> Arrays:
        opened = [open_image(media, budget) for media in images]
        try:
            made = self._images(images=opened, return_tensors="np")
        except ValueError as error:
            raise RequestError(f"an image of the prompt cannot be used ({error}): give another") from error
        return {"pixel_values": made["pixel_values"].astype(np.float32), "image_grid_thw": made["image_grid_thw"]}

    def _encode_videos(self, videos: Sequence[Sequence[Image.Image]], budget: MediaBudget) -> Arrays:
        made = [self._frames(frames, budget) for frames in videos]
        return {
            "pixel_values_videos": np.concatenate([patches for patches, _ in made]),
            "video_grid_thw": np.array([grid for _, grid in made], np.int64),
        }

    def _num_tokens(self, grid: npt.NDArray[np.int64]) -> int:
        return int(grid.prod()) // self._inputs.merge_size**2

    def _video_text(self, grid: npt.NDArray[np.int64], fps: float, num_frames: int) -> str:
        """Return the text of a video: its placeholder tokens, with timestamps if the model uses them."""
        token, num_tokens = self._tokens["video"], self._num_tokens(grid)
        if self._config.model_type not in TIMESTAMPED:
            return token * num_tokens
        steps, start, end = int(grid[0]), *self._marks()
        # The timestamp of a temporal patch is the mean time of its first and last frame.
        each = self._frames.temporal_patch_size
        times = [(step * each + min((step + 1) * each, num_frames) - 1) / 2 / fps for step in range(steps)]
        return "".join(f"<{time:.1f} seconds>{start}{token * (num_tokens // steps)}{end}" for time in times)

    def _marks(self) -> tuple[str, str]:
        ids = (self._config.vision_start_token_id, self._config.vision_end_token_id)
        start, end = self._tokenizer.convert_ids_to_tokens(list(ids))
        return start, end

    def _expand(self, text: str, kind: str, replacements: Sequence[str]) -> str:
        """Replace the one placeholder that the chat template writes for each item by the item's tokens."""
        token = self._tokens[kind]
        if kind == "video" and self._config.model_type in TIMESTAMPED:
            start, end = self._marks()
            text = text.replace(f"{start}{token}{end}", token)
        pieces = text.split(token)
        if len(pieces) != len(replacements) + 1:
            raise RequestError(
                f"the chat template gives the prompt {len(pieces) - 1} places {token} for {len(replacements)} {kind}s: "
                f"use the model's own template, and leave {token} out of the text"
            )
        return "".join(piece + filling for piece, filling in zip(pieces, [*replacements, ""], strict=True))

    def _position_ids(self, ids: list[int], tensors: Arrays, seconds: list[float]) -> npt.NDArray[np.int32]:
        """Return the positions of the tokens in time, height and width, int32 [3, prompt].

        `seconds` is the duration of a temporal patch of each video.
        """
        token_ids = torch.tensor([ids])
        kinds = torch.zeros_like(token_ids)
        for kind, token in enumerate(placeholder_ids(self._inputs).values(), 1):
            kinds[token_ids == token] = kind
        grids = {
            name: torch.from_numpy(tensors[name]) if name in tensors else None for name in placeholder_ids(self._inputs)
        }
        positions, _ = self._positions(
            token_ids, mm_token_type_ids=kinds, second_per_grid_ts=torch.tensor(seconds) if seconds else None, **grids
        )
        made: npt.NDArray[np.int32] = positions[:, 0].numpy().astype(np.int32)
        return made


@dataclass(frozen=True, slots=True)
class FrameProcessor:
    """Cuts the frames of a video into patches, with the parameters of the model's video processor."""

    patch_size: int
    temporal_patch_size: int
    """Frames of one patch; the last frame is repeated to fill the last patch."""
    merge_size: int
    min_pixels: int
    max_pixels: int
    """Bounds on the pixels of the resized video: of all frames if `per_video`, else of each frame."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    per_video: bool

    @classmethod
    def read(cls, folder: Path, *, per_video: bool) -> FrameProcessor:
        """Read the parameters from the files that transformers reads, in the same order of precedence."""
        nested = _json(folder / "processor_config.json").get("video_processor") or {}
        found = nested or _json(folder / "video_preprocessor_config.json") or _json(folder / "preprocessor_config.json")
        patch_size, merge_size = int(found.get("patch_size", 14)), int(found.get("merge_size", 2))
        pixels_per_token = (patch_size * merge_size) ** 2
        size = found.get("size") or {}
        return cls(
            patch_size=patch_size,
            temporal_patch_size=int(found.get("temporal_patch_size", 2)),
            merge_size=merge_size,
            min_pixels=int(found.get("min_pixels") or size.get("shortest_edge") or 128 * pixels_per_token),
            max_pixels=int(found.get("max_pixels") or size.get("longest_edge") or 768 * pixels_per_token),
            mean=tuple(found.get("image_mean", (0.5, 0.5, 0.5))),
            std=tuple(found.get("image_std", (0.5, 0.5, 0.5))),
            per_video=per_video,
        )

    def __call__(self, frames: Sequence[Image.Image], budget: MediaBudget) -> tuple[npt.NDArray[np.float32], list[int]]:
        """Return the patches [patches, values], and their grid [time, height, width]."""
        from PIL.Image import Resampling

        frames = [*frames, *[frames[-1]] * (-len(frames) % self.temporal_patch_size)]
        try:
            height, width = self._size(len(frames), *reversed(frames[0].size))
        except ValueError as error:
            raise RequestError(f"a video of the prompt cannot be used ({error}): give another") from error
        # Small frames are enlarged, and a small file can have many of them.
        budget.check(len(frames) * height * width * 3 * np.dtype(np.float32).itemsize)
        resized = [np.asarray(frame.resize((width, height), Resampling.BICUBIC), np.float32) for frame in frames]
        pixels_THWC = (np.stack(resized) / 255.0 - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
        patch, merge, steps = self.patch_size, self.merge_size, len(frames) // self.temporal_patch_size
        rows, columns = height // patch, width // patch
        cut = pixels_THWC.reshape(
            steps, self.temporal_patch_size, rows // merge, merge, patch, columns // merge, merge, patch, 3
        )
        # Patches that are merged into one token are adjacent; within a patch: channel, frame, height, width.
        ordered = cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        patches = ordered.reshape(steps * rows * columns, -1)
        return np.ascontiguousarray(patches, np.float32), [steps, rows, columns]

    def _size(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """Return the nearest height and width that are multiples of the merged patch and within the pixel bounds."""
        factor = self.patch_size * self.merge_size
        if self.per_video:
            from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as of_video

            fitted = of_video(
                num_frames, height, width, self.temporal_patch_size, factor, self.min_pixels, self.max_pixels
            )
        else:
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as of_frame

            fitted = of_frame(height, width, factor, self.min_pixels, self.max_pixels)
        return int(fitted[0]), int(fitted[1])


def _json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON ({error}): replace it") from error
    return found if isinstance(found, dict) else {}
