"""Prompts with images and videos, for the Qwen family of vision-language models: tokens, pixels and positions.

All three are made here, once. The policy trains on exactly these, so it needs neither processor nor tokenizer, and
its log-probabilities of a completion are those of the rollout.

Images go through the model's own image processor. Videos are made into patches here, as their frames come: the
processors of transformers for videos need torchvision, and choose frames by a clock that a folder of frames has not.
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

from starling.algo.architecture import auto_class
from starling.algo.text import check_media, encode_prompt, encode_text, prompt_text
from starling.common.errors import ConfigError
from starling.common.wire.messages import Media, Prompt
from starling.rollout.engine.base import RequestError
from starling.rollout.engine.multimodal.loading import MediaBudget, open_image, open_video

if TYPE_CHECKING:
    from PIL import Image

Arrays = dict[str, npt.NDArray[Any]]

_TIMESTAMPED: Final = ("qwen3_vl", "qwen3_vl_moe")
"""Their videos are frames, each with its time in words before it, under a budget of pixels for all together."""
_FAMILY: Final = ("qwen2_vl", "qwen2_5_vl", *_TIMESTAMPED)
_DEFAULT_FPS: Final = 2.0


def placeholders(config: Any) -> dict[str, int]:
    """Return, by the grids that describe them, the tokens that stand for images and videos; empty without vision."""
    if config.model_type not in _FAMILY:
        return {}
    return {"image_grid_thw": int(config.image_token_id), "video_grid_thw": int(config.video_token_id)}


def patches_per_token(config: Any) -> int:
    """Return how many patches the model merges into one token."""
    return int(config.vision_config.spatial_merge_size) ** 2 if placeholders(config) else 1


class PromptEncoder:
    """Makes prompts into what the model of an engine takes."""

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        folder: Path,
        *,
        max_media_bytes: int,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Make an encoder for the model of `config`, whose processors are described in `folder`.

        Args:
            config: the model's.
            tokenizer: the model's, with a chat template that knows images where the model does.
            folder: in Hugging Face form.
            max_media_bytes: most bytes of the images and videos of one prompt, decoded and as tensors.
            tools: functions that the model may call, of which the chat template tells it.

        Raises:
            ConfigError: a vision-language model, and the folder describes no image processor.
        """
        self._tokenizer, self._max_bytes, self._tools = tokenizer, max_media_bytes, tuple(tools)
        self._vision = _Vision(config, tokenizer, folder, self._tools) if placeholders(config) else None

    def encode(self, prompt: Prompt) -> tuple[list[int], Arrays]:
        """Return the token ids that the model continues, and the tensors of the prompt's media (see `TrainGroup`).

        Raises:
            ConfigError: the prompt's media are not those that it asks for, the model has no use for them, or the
                tokenizer has no chat template.
            RequestError: an image does not decode or does not exist, or they are too much.
        """
        if self._vision is None:
            return encode_prompt(self._tokenizer, prompt, self._tools), {}
        check_media(prompt)
        if not prompt.media:
            return encode_prompt(self._tokenizer, prompt, self._tools), {}
        allowance = MediaBudget(self._max_bytes)
        ids, tensors = self._vision.encode(prompt, allowance)
        allowance.check(sum(array.nbytes for array in tensors.values()))
        return ids, tensors


class _Vision:
    """The vision half of a `PromptEncoder`."""

    def __init__(self, config: Any, tokenizer: Any, folder: Path, tools: Sequence[Mapping[str, Any]]) -> None:
        from transformers import AutoImageProcessor

        self._config, self._tokenizer, self._tools = config, tokenizer, tools
        with torch.device("meta"):  # without memory: only its rule of positions is wanted
            self._positions = auto_class(config).from_config(config).base_model.get_rope_index
        self._cells_per_token = patches_per_token(config)
        self._tokens = {
            kind: str(tokenizer.convert_ids_to_tokens(token))
            for kind, token in zip(("image", "video"), placeholders(config).values(), strict=True)
        }
        try:
            # One implementation everywhere: an image has the same pixels whatever else is installed.
            self._images = AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
        except (OSError, ValueError, ImportError) as error:
            reason = str(error).strip().split("\n", 1)[0].rstrip(".")
            raise ConfigError(f"the image processor of {str(folder)!r} cannot be loaded: {reason}") from error
        self._frames = FrameProcessor.read(folder, per_video=config.model_type in _TIMESTAMPED)

    def encode(self, prompt: Prompt, allowance: MediaBudget) -> tuple[list[int], Arrays]:
        """Return the token ids of `prompt`, and its tensors by name."""
        tensors: Arrays = {}
        texts: dict[str, list[str]] = {"image": [], "video": []}
        if images := [media for media in prompt.media if media.kind == "image"]:
            tensors |= self._encode_images(images, allowance)
            texts["image"] = [self._tokens["image"] * self._num_tokens(grid) for grid in tensors["image_grid_thw"]]
        videos = [media for media in prompt.media if media.kind == "video"]
        if videos:
            opened = [open_video(media, allowance) for media in videos]
            tensors |= self._encode_videos(opened, allowance)
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
        return ids, tensors

    def _encode_images(self, images: Sequence[Media], allowance: MediaBudget) -> Arrays:
        opened = [open_image(media, allowance) for media in images]
        try:
            made = self._images(images=opened, return_tensors="np")
        except ValueError as error:
            raise RequestError(f"an image of the prompt cannot be used ({error}): give another") from error
        return {"pixel_values": made["pixel_values"].astype(np.float32), "image_grid_thw": made["image_grid_thw"]}

    def _encode_videos(self, videos: Sequence[Sequence[Image.Image]], allowance: MediaBudget) -> Arrays:
        made = [self._frames(frames, allowance) for frames in videos]
        return {
            "pixel_values_videos": np.concatenate([patches for patches, _ in made]),
            "video_grid_thw": np.array([grid for _, grid in made], np.int64),
        }

    def _num_tokens(self, grid: npt.NDArray[np.int64]) -> int:
        return int(grid.prod()) // self._cells_per_token

    def _video_text(self, grid: npt.NDArray[np.int64], fps: float, num_frames: int) -> str:
        """Return what stands for a video in the text: its tokens, by time where the model wants it so."""
        token, num_tokens = self._tokens["video"], self._num_tokens(grid)
        if self._config.model_type not in _TIMESTAMPED:
            return token * num_tokens
        steps, start, end = int(grid[0]), *self._marks()
        # The time of a step is the mean of those of its first and its last frame.
        each = self._frames.temporal_patch_size
        times = [(step * each + min((step + 1) * each, num_frames) - 1) / 2 / fps for step in range(steps)]
        return "".join(f"<{time:.1f} seconds>{start}{token * (num_tokens // steps)}{end}" for time in times)

    def _marks(self) -> tuple[str, str]:
        ids = (self._config.vision_start_token_id, self._config.vision_end_token_id)
        start, end = self._tokenizer.convert_ids_to_tokens(list(ids))
        return start, end

    def _expand(self, text: str, kind: str, replacements: Sequence[str]) -> str:
        """Put the tokens of each image or video where the chat template has its one placeholder."""
        token = self._tokens[kind]
        if kind == "video" and self._config.model_type in _TIMESTAMPED:
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
        """Return where each token stands in time, height and width, int32 [3, prompt]; `seconds`: of a video's step."""
        token_ids = torch.tensor([ids])
        kinds = torch.zeros_like(token_ids)
        for kind, token in enumerate(placeholders(self._config).values(), 1):
            kinds[token_ids == token] = kind
        grids = {
            name: torch.from_numpy(tensors[name]) if name in tensors else None for name in placeholders(self._config)
        }
        positions, _ = self._positions(
            token_ids, mm_token_type_ids=kinds, second_per_grid_ts=torch.tensor(seconds) if seconds else None, **grids
        )
        made: npt.NDArray[np.int32] = positions[:, 0].numpy().astype(np.int32)
        return made


@dataclass(frozen=True, slots=True)
class FrameProcessor:
    """Makes the frames of a video into patches, by the numbers of the model's video processor."""

    patch_size: int
    temporal_patch_size: int
    """Frames of one patch; the last one is repeated where they do not come out even."""
    merge_size: int
    least: int
    most: int
    """Pixels of the resized video: of all frames with `per_video`, else of each."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    per_video: bool

    @classmethod
    def read(cls, folder: Path, *, per_video: bool) -> FrameProcessor:
        """Read the numbers where transformers looks for them, in this order."""
        nested = _json(folder / "processor_config.json").get("video_processor") or {}
        found = nested or _json(folder / "video_preprocessor_config.json") or _json(folder / "preprocessor_config.json")
        patch_size, merge_size = int(found.get("patch_size", 14)), int(found.get("merge_size", 2))
        pixels_per_token = (patch_size * merge_size) ** 2
        size = found.get("size") or {}
        return cls(
            patch_size=patch_size,
            temporal_patch_size=int(found.get("temporal_patch_size", 2)),
            merge_size=merge_size,
            least=int(found.get("min_pixels") or size.get("shortest_edge") or 128 * pixels_per_token),
            most=int(found.get("max_pixels") or size.get("longest_edge") or 768 * pixels_per_token),
            mean=tuple(found.get("image_mean", (0.5, 0.5, 0.5))),
            std=tuple(found.get("image_std", (0.5, 0.5, 0.5))),
            per_video=per_video,
        )

    def __call__(
        self, frames: Sequence[Image.Image], allowance: MediaBudget
    ) -> tuple[npt.NDArray[np.float32], list[int]]:
        """Return the patches [cells, values], and the grid [time, height, width] in which they lie."""
        from PIL.Image import Resampling

        frames = [*frames, *[frames[-1]] * (-len(frames) % self.temporal_patch_size)]
        try:
            height, width = self._size(len(frames), *reversed(frames[0].size))
        except ValueError as error:
            raise RequestError(f"a video of the prompt cannot be used ({error}): give another") from error
        # Small frames are made larger, of which there can be many in a small file.
        allowance.check(len(frames) * height * width * 3 * np.dtype(np.float32).itemsize)
        resized = [np.asarray(frame.resize((width, height), Resampling.BICUBIC), np.float32) for frame in frames]
        pixels_THWC = (np.stack(resized) / 255.0 - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
        patch, merge, steps = self.patch_size, self.merge_size, len(frames) // self.temporal_patch_size
        rows, columns = height // patch, width // patch
        cut = pixels_THWC.reshape(
            steps, self.temporal_patch_size, rows // merge, merge, patch, columns // merge, merge, patch, 3
        )
        # Cells that one token merges lie side by side; within a cell: channel, frame, height, width.
        ordered = cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        patches = ordered.reshape(steps * rows * columns, -1)
        return np.ascontiguousarray(patches, np.float32), [steps, rows, columns]

    def _size(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """Return the height and width nearest to those given that fit patches and the bounds on pixels."""
        factor = self.patch_size * self.merge_size
        if self.per_video:
            from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as of_video

            fitted = of_video(num_frames, height, width, self.temporal_patch_size, factor, self.least, self.most)
        else:
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as of_frame

            fitted = of_frame(height, width, factor, self.least, self.most)
        return int(fitted[0]), int(fitted[1])


def _json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON ({error}): write it anew") from error
    return found if isinstance(found, dict) else {}
