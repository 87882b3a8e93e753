"""Prompts with images and videos, made by `engine.vision` and taken by vLLM as they are.

vLLM has processors of its own for them. They want a tokenizer, torchvision, and text to begin with, and would place
tokens by rules of their own; what the policy trains on, however, are the tokens, pixels and positions of the request.
So the engine's processes are started with a processor that knows only how large media may be, each request brings the
rest, and workers take its positions in place of theirs.

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

from starling.common.errors import ConfigError
from starling.rollout.engine.base import GroupRequest, RequestError
from starling.rollout.engine.multimodal.prompts import placeholders
from starling.weightsync.layouts.checkpoint import open_folder

KINDS = {"image_grid_thw": ("image", "pixel_values"), "video_grid_thw": ("video", "pixel_values_videos")}
"""What vLLM calls what a grid describes, and the patches that belong to it."""
POSITIONS = "starling_position_ids"
"""By which name an item carries the positions from its first token to the next item, or the prompt's end."""


def check_model(config: Any) -> None:
    """Refuse a model with vision that vLLM would not compute as transformers does.

    Raises:
        ConfigError: its file leaves out an entry which vLLM goes by.
    """
    if not placeholders(config):
        return
    text = config.get_text_config()
    if config.model_type == "qwen3_vl_moe" and not getattr(text, "norm_topk_prob", False):
        raise ConfigError(
            f"the text_config of a model of type {config.model_type} does not say norm_topk_prob, and vLLM would not "
            "know how to weigh its experts; add norm_topk_prob = true to it in config.json"
        )
    rope = getattr(text, "rope_parameters", None) or {}
    if config.model_type.startswith("qwen3") and not rope.get("mrope_interleaved"):
        raise ConfigError(
            f"the rope_parameters of a model of type {config.model_type} do not say mrope_interleaved, and vLLM would "
            "take its positions for those of another family; add mrope_interleaved = true to them in config.json"
        )


def check_files(folder: Path, config: Any) -> None:
    """Refuse files of weights that vLLM would read, and take for others.

    Raises:
        ConfigError: experts of Qwen3-VL that do not lie transposed, as published ones do.
    """
    if config.model_type != "qwen3_vl_moe":
        return
    hidden = config.get_text_config().hidden_size
    with open_folder(folder) as files:
        for spec in files.tensors:
            if spec.name.endswith(".experts.gate_up_proj") and spec.shape[1] != hidden:
                raise ConfigError(
                    f"{spec.name} in {str(folder)!r} lies as transformers writes it, {list(spec.shape)}, and vLLM "
                    "wants it transposed, as it is published; set rollout.load_weights = false or rollout.engine = "
                    "'transformers'"
                )


class _Sizes(BaseProcessingInfo):  # type: ignore[misc]
    """All that vLLM has to know before there is a request."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Any number of each kind."""
        return dict.fromkeys(("image", "video"))

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        """Return most tokens of one item: as many as fit into the context."""
        return dict.fromkeys(mm_counts, seq_len)


class _Nothing(BaseDummyInputsBuilder):  # type: ignore[misc]
    """No media to measure memory with: `start` says to leave that out."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        """Return a text without media."""
        return ""

    def get_dummy_mm_data(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        """Return no media."""
        return {}


class _Prepared(BaseMultiModalProcessor):  # type: ignore[misc]
    """A processor that is asked for sizes only, as prompts come processed."""

    requires_tokenizer = False

    def _get_mm_fields_config(self, *arguments: Any, **named: Any) -> Mapping[str, Any]:
        return {}

    def _get_prompt_updates(self, *arguments: Any, **named: Any) -> Sequence[Any]:
        return ()


def take_prepared_prompts() -> None:
    """Have vLLM take prompts with media as they come; in each process, before there is an engine or a worker."""
    if "create_processor" in vars(MULTIMODAL_REGISTRY):  # it does already
        return
    create = MULTIMODAL_REGISTRY.create_processor

    def create_processor(model_config: Any, **named: Any) -> Any:
        if not placeholders(model_config.hf_config):
            return create(model_config, **named)
        info = _Sizes(InputProcessingContext(model_config, None))
        return _Prepared(info, _Nothing(info))

    MULTIMODAL_REGISTRY.create_processor = create_processor


def use_given_positions(model: Any, config: Any) -> None:
    """Have a worker's model place the tokens of a prompt where its items say.

    vLLM places what follows a video behind its last time, others behind its height and width.
    """
    if not placeholders(config):
        return

    def positions_of(input_tokens: list[int], mm_features: list[Any]) -> tuple[torch.Tensor, int]:
        positions = torch.arange(len(input_tokens)).repeat(3, 1)
        end = 0
        for feature in sorted(mm_features, key=lambda feature: feature.mm_position.offset):
            told, start = feature.data[POSITIONS].data, feature.mm_position.offset
            end = start + told.shape[1]
            positions[:, start:end] = told
        if end:  # what was sampled before an interruption counts on from the prompt's last token
            positions[:, end:] = positions[:, end - 1].max() + 1 + torch.arange(len(input_tokens) - end)
        return positions, int(positions[:, -1].max()) + 1 - len(input_tokens)

    model.get_mrope_input_positions = positions_of


@dataclass(frozen=True, slots=True)
class Item:
    """One image or video of a prompt."""

    kind: str
    """`image` or `video`."""
    place: Any
    """Where its tokens stand."""
    tensors: Any
    digest: str
    """Of all that its keys and values depend on, beside the tokens before them."""


def items_of(request: GroupRequest, tokens: Mapping[str, int], patches_per_token: int) -> tuple[Item, ...]:
    """Return the images and videos of a prompt in their order.

    Args:
        request: whose placeholder tokens fit its grids.
        tokens: as `vision.placeholders`.
        patches_per_token: patches that the model merges into one token.

    Raises:
        RequestError: pixels or positions are missing, or are not as many as the grids or tokens.
    """
    if not request.tensors:
        return ()
    positions = request.tensors.get("position_ids")
    if positions is None or positions.shape != (3, len(request.prompt_ids)):
        raise RequestError(
            f"{request.lease}: position_ids are {'missing' if positions is None else positions.shape} for a prompt of "
            f"{len(request.prompt_ids)} tokens with media; give [3, tokens]"
        )
    ids = np.array(request.prompt_ids)
    found = []
    for grid_name in tokens.keys() & request.tensors.keys():
        standing = np.flatnonzero(ids == tokens[grid_name])
        taken = 0
        for patches, grid in _split(request, grid_name):
            stand = standing[taken : taken + len(patches) // patches_per_token]
            taken += len(stand)
            found.append((stand, KINDS[grid_name], patches, grid))
    found.sort(key=lambda each: int(each[0][0]))
    ends = [*(int(stand[0]) for stand, *_ in found), len(ids)]
    return tuple(
        _item(stand, kind, patches, grid, positions[:, start:end])
        for (stand, kind, patches, grid), (start, end) in zip(found, pairwise(ends), strict=True)
    )


def engine_input(token_ids: list[int], items: Sequence[Item], salt: str) -> Any:
    """Return what vLLM is asked to continue: tokens and media.

    Args:
        token_ids: all tokens, at least those of the prompt.
        items: of the prompt.
        salt: what the cache of this request is salted with; also that of what the vision half computes, which older
            weights may have done.
    """
    by_kind: dict[str, list[Item]] = {}
    for item in items:
        by_kind.setdefault(item.kind, []).append(item)
    return mm_input(
        token_ids,
        {kind: [item.tensors for item in those] for kind, those in by_kind.items()},
        {kind: [item.digest + salt for item in those] for kind, those in by_kind.items()},
        {kind: [item.place for item in those] for kind, those in by_kind.items()},
        cache_salt=salt or None,
    )


def _split(request: GroupRequest, grid_name: str) -> list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """Return patches and grid of each item that `grid_name` describes."""
    grids, name = request.tensors[grid_name], KINDS[grid_name][1]
    patches = request.tensors.get(name)
    ends = np.cumsum(grids.prod(axis=1))
    if patches is None or len(patches) != ends[-1]:
        raise RequestError(
            f"{request.lease}: {name} has {0 if patches is None else len(patches)} patches where {grid_name} describes "
            f"{ends[-1]}; give one for each cell of the grids"
        )
    return list(zip(np.split(patches, ends[:-1]), grids, strict=True))


def _item(
    stand: npt.NDArray[Any],
    kind: tuple[str, str],
    patches: npt.NDArray[Any],
    grid: npt.NDArray[Any],
    positions: npt.NDArray[Any],
) -> Item:
    name, pixels = kind
    first, length = int(stand[0]), int(stand[-1] - stand[0]) + 1
    held = None
    if length > len(stand):  # times in words stand between the frames
        held = torch.zeros(length, dtype=torch.bool)
        held[torch.from_numpy(stand - first)] = True
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
    return Item(name, PlaceholderRange(first, length, held), tensors, digest.hexdigest())
