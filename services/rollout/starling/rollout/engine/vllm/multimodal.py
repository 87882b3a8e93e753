"""Preprocessed prompts with images and videos for vLLM, as `engine.multimodal.prompts` encodes them.

vLLM's own multimodal processors need a tokenizer, torchvision and text prompts, and compute positions by rules of their
own; but the policy trains on the tokens, pixels and positions of the request. So the engine's processes get a processor
that only states size limits, each request brings its tensors, and workers use the positions of the request.

Written for the processors and the first model runner of vLLM 0.32 and 0.33.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.inputs.engine import mm_input
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.multimodal.processing import BaseDummyInputsBuilder, BaseMultiModalProcessor, BaseProcessingInfo
from vllm.multimodal.processing.context import InputProcessingContext

from starling.algo.architecture import placeholders
from starling.algo.media import placeholder_ids
from starling.common.errors import ConfigError
from starling.common.wire.messages import MediaInputs
from starling.rollout.engine.base import GroupRequest
from starling.weightsync.layouts.checkpoint import open_folder

KINDS = {"image_grid_thw": ("image", "pixel_values"), "video_grid_thw": ("video", "pixel_values_videos")}
"""vLLM's names of the modality and of the patches, by the name of the grid."""
POSITIONS = "starling_position_ids"
"""The field of an item with the positions from its first token to the next item, or to the prompt's end."""


def check_model(config: Any) -> None:
    """Reject a vision model that vLLM would compute differently from transformers.

    Raises:
        ConfigError: its configuration lacks an entry that vLLM depends on.
    """
    if not placeholders(config):
        return
    text = config.get_text_config()
    if config.model_type == "qwen3_vl_moe" and not getattr(text, "norm_topk_prob", False):
        raise ConfigError(
            f"the text_config of a model of type {config.model_type} has no norm_topk_prob, which vLLM needs to weight "
            "its experts; add norm_topk_prob = true to it in config.json"
        )
    rope = getattr(text, "rope_parameters", None) or {}
    if config.model_type.startswith("qwen3") and not rope.get("mrope_interleaved"):
        raise ConfigError(
            f"the rope_parameters of a model of type {config.model_type} have no mrope_interleaved, so vLLM would "
            "apply its positions as for another family; add mrope_interleaved = true to them in config.json"
        )


def check_files(folder: Path, config: Any) -> None:
    """Reject weight files that vLLM would misread.

    Raises:
        ConfigError: experts of Qwen3-VL that are not transposed, as the published ones are.
    """
    if config.model_type != "qwen3_vl_moe":
        return
    hidden = config.get_text_config().hidden_size
    with open_folder(folder) as files:
        for spec in files.tensors:
            if spec.name.endswith(".experts.gate_up_proj") and spec.shape[1] != hidden:
                raise ConfigError(
                    f"{spec.name} in {str(folder)!r} has transformers' shape {list(spec.shape)}, and vLLM needs it "
                    "transposed, as published; set rollout.load_weights = false or rollout.engine = "
                    "'transformers'"
                )


class _SizeLimits(BaseProcessingInfo):  # type: ignore[misc]
    """Size limits that vLLM needs before the first request."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Return no limit for either modality."""
        return dict.fromkeys(("image", "video"))

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        """Return the maximum number of tokens of one item: the context length."""
        return dict.fromkeys(mm_counts, seq_len)


class _NoDummyInputs(BaseDummyInputsBuilder):  # type: ignore[misc]
    """No dummy media: `launch` disables memory profiling with them."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        """Return a text without media."""
        return ""

    def get_dummy_mm_data(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        """Return no media."""
        return {}


class _PreparedProcessor(BaseMultiModalProcessor):  # type: ignore[misc]
    """A processor that only states sizes, as prompts arrive preprocessed."""

    requires_tokenizer = False

    def _get_mm_fields_config(self, *arguments: Any, **named: Any) -> Mapping[str, Any]:
        return {}

    def _get_prompt_updates(self, *arguments: Any, **named: Any) -> Sequence[Any]:
        return ()


def take_prepared_prompts() -> None:
    """Make vLLM accept preprocessed prompts; call it in each process, before an engine or a worker is created."""
    if "create_processor" in vars(MULTIMODAL_REGISTRY):  # already patched
        return
    create = MULTIMODAL_REGISTRY.create_processor

    def create_processor(model_config: Any, **named: Any) -> Any:
        if not placeholders(model_config.hf_config):
            return create(model_config, **named)
        info = _SizeLimits(InputProcessingContext(model_config, None))
        return _PreparedProcessor(info, _NoDummyInputs(info))

    MULTIMODAL_REGISTRY.create_processor = create_processor


def use_given_positions(model: Any, config: Any) -> None:
    """Make a worker's model use the positions that a prompt's items bring.

    After a video, vLLM continues from its last time step, and transformers from its height and width.
    """
    if not placeholders(config):
        return

    def positions_of(input_tokens: list[int], mm_features: list[Any]) -> tuple[torch.Tensor, int]:
        positions = torch.arange(len(input_tokens)).repeat(3, 1)
        end = 0
        for feature in sorted(mm_features, key=lambda feature: feature.mm_position.offset):
            given, start = feature.data[POSITIONS].data, feature.mm_position.offset
            end = start + given.shape[1]
            positions[:, start:end] = given
        if end:  # tokens of a partial completion continue from the prompt's last token
            positions[:, end:] = positions[:, end - 1].max() + 1 + torch.arange(len(input_tokens) - end)
        return positions, int(positions[:, -1].max()) + 1 - len(input_tokens)

    model.get_mrope_input_positions = positions_of


@dataclass(frozen=True, slots=True)
class MediaItem:
    """An image or video of a prompt, in the form that vLLM takes."""

    kind: str
    """`image` or `video`."""
    placeholder_range: Any
    """The range of its placeholder tokens."""
    tensors: Any
    digest: str
    """Digest of everything that its KV cache depends on, apart from the tokens before it."""


def items_of(request: GroupRequest, inputs: MediaInputs | None) -> tuple[MediaItem, ...]:
    """Return the images and videos of a prompt in their order.

    Args:
        request: a request that `check_tensors` has passed.
        inputs: the form in which the model takes them.
    """
    if not request.tensors or inputs is None:
        return ()
    positions, ids, tokens = request.tensors["position_ids"], np.array(request.prompt_ids), placeholder_ids(inputs)
    found = []
    for grid_name in tokens.keys() & request.tensors.keys():
        token_indices = np.flatnonzero(ids == tokens[grid_name])
        taken = 0
        for patches, grid in _split(request, grid_name):
            indices = token_indices[taken : taken + len(patches) // inputs.merge_size**2]
            taken += len(indices)
            found.append((indices, KINDS[grid_name], patches, grid))
    found.sort(key=lambda each: int(each[0][0]))
    ends = [*(int(indices[0]) for indices, *_ in found), len(ids)]
    return tuple(
        _item(indices, kind, patches, grid, positions[:, start:end])
        for (indices, kind, patches, grid), (start, end) in zip(found, pairwise(ends), strict=True)
    )


def engine_input(token_ids: list[int], items: Sequence[MediaItem], salt: str) -> Any:
    """Return vLLM's input for a prompt with media.

    Args:
        token_ids: the tokens of the prompt and of a partial completion.
        items: the images and videos of the prompt.
        salt: salt of the prefix cache for this request, and of the cache of vision encoder outputs, which older weights
            may have computed.
    """
    by_kind: dict[str, list[MediaItem]] = {}
    for item in items:
        by_kind.setdefault(item.kind, []).append(item)
    return mm_input(
        token_ids,
        {kind: [item.tensors for item in of_kind] for kind, of_kind in by_kind.items()},
        {kind: [item.digest + salt for item in of_kind] for kind, of_kind in by_kind.items()},
        {kind: [item.placeholder_range for item in of_kind] for kind, of_kind in by_kind.items()},
        cache_salt=salt or None,
    )


def _split(request: GroupRequest, grid_name: str) -> list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """Return the patches and the grid of each item of the modality of `grid_name`."""
    grids = request.tensors[grid_name]
    patches, ends = request.tensors[KINDS[grid_name][1]], np.cumsum(grids.prod(axis=1))
    return list(zip(np.split(patches, ends[:-1]), grids, strict=True))


def _item(
    indices: npt.NDArray[Any],
    kind: tuple[str, str],
    patches: npt.NDArray[Any],
    grid: npt.NDArray[Any],
    positions: npt.NDArray[Any],
) -> MediaItem:
    name, pixels = kind
    first, length = int(indices[0]), int(indices[-1] - indices[0]) + 1
    is_embed = None
    if length > len(indices):  # timestamps as text between the frames
        is_embed = torch.zeros(length, dtype=torch.bool)
        is_embed[torch.from_numpy(indices - first)] = True
    digest = hashlib.sha256(np.ascontiguousarray(patches).data)
    digest.update(np.asarray(grid, np.int64).tobytes())
    digest.update(np.asarray(positions[:, :length] - positions[:, :1], np.int64).tobytes())
    small = MultiModalBatchedField(keep_on_cpu=True)
    tensors = MultiModalKwargsItem(
        {
            pixels: MultiModalFieldElem(
                torch.tensor(patches), MultiModalFlatField(slices=[slice(0, len(patches))], dim=0)
            ),
            f"{name}_grid_thw": MultiModalFieldElem(torch.tensor(grid, dtype=torch.int64), small),
            POSITIONS: MultiModalFieldElem(torch.tensor(positions, dtype=torch.int64), small),
        }
    )
    return MediaItem(name, PlaceholderRange(first, length, is_embed), tensors, digest.hexdigest())
