"""Images and videos of a prompt: whether their tensors are those that a vision-language model takes.

A rollout makes these tensors. Where pixels, grids and placeholder tokens do not match, the forward pass fails for all
groups that are packed together, so the controller checks them before they are stored, and the policy before a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from starling.common.wire.messages import MediaInputs
from starling.common.wire.tensors import PIXEL_GRIDS, POSITION_IDS

Array = npt.NDArray[Any]

MAX_GRID: Final = 1 << 16
"""Largest dimension of an image or a video, in patches: a product of three is exact in float64."""
MAX_PIXEL: Final = 1e4
"""Largest absolute value of a pixel. Normalised ones are below 10; at 1e25 no gradient of the whole step is finite."""
MAX_POSITION: Final = 1 << 24
"""Rotary embeddings compute positions in float32, which has all integers below this."""


def placeholder_ids(inputs: MediaInputs) -> dict[str, int]:
    """Return the placeholder tokens of images and videos, by the names of their grids."""
    images, videos = PIXEL_GRIDS.values()
    return {images: inputs.image_token_id, videos: inputs.video_token_id}


def media_problem(
    tensors: Mapping[str, Array], prompt_ids: npt.NDArray[np.int32], inputs: MediaInputs | None = None
) -> str:
    """Return why a model cannot take the images and videos of a prompt, as a clause; empty if it can.

    Args:
        tensors: those of the prompt by name, of the forms in `PROMPT_TENSORS`; empty without images and videos.
        prompt_ids: the prompt's token ids, [prompt].
        inputs: the form that the model takes; None if it is not known.
    """
    if not tensors and inputs is None:
        return ""
    for pixels, grid in PIXEL_GRIDS.items():
        problem = _pixels_problem(tensors, prompt_ids, pixels, grid, inputs)
        if problem:
            return problem
    return _positions_problem(tensors, len(prompt_ids), inputs) if tensors else ""


def pixel_problem(tensors: Mapping[str, Array]) -> str:
    """Return which pixels have no usable value, as a clause; empty if all have."""
    for pixels in PIXEL_GRIDS:
        values = tensors.get(pixels)
        # A NaN is in both extremes. Neither makes a copy, and pixels can have gigabytes.
        if values is not None and values.size and not (values.min() >= -MAX_PIXEL and values.max() <= MAX_PIXEL):
            return f"its {pixels} are not finite, or beyond {MAX_PIXEL:g}: normalise the pixels"
    return ""


def placeholders_in(token_ids: npt.NDArray[np.int32], inputs: MediaInputs | None) -> npt.NDArray[np.bool_]:
    """Return which tokens are placeholders, which no completion may have, [T]: images come with the prompt only."""
    if inputs is None:
        return np.zeros(len(token_ids), np.bool_)
    found: npt.NDArray[np.bool_] = (token_ids == inputs.image_token_id) | (token_ids == inputs.video_token_id)
    return found


def _pixels_problem(
    tensors: Mapping[str, Array], prompt_ids: npt.NDArray[np.int32], pixels: str, grid: str, inputs: MediaInputs | None
) -> str:
    """Return what is wrong with the images, or the videos."""
    rows, grids, num_patches = tensors.get(pixels), tensors.get(grid), 0.0
    if (rows is None) != (grids is None):
        return f"one of {pixels} and {grid} came without the other"
    if rows is not None and grids is not None:
        if grids.shape[1] != 3 or not len(grids) or grids.min() < 1 or grids.max() > MAX_GRID:
            return f"{grid} {list(grids.shape)} has not three numbers from 1 to {MAX_GRID} of each image or video"
        num_patches = float(grids.prod(axis=1, dtype=np.float64).sum())
        if len(rows) != num_patches:
            return f"{len(rows)} rows of {pixels} came, and {grid} describes {num_patches:.0f}"
    if inputs is None:
        return ""
    if rows is not None and rows.shape[1] != inputs.patch_values:
        return f"{pixels} have {rows.shape[1]} values in a patch, and the model takes {inputs.patch_values}"
    if grids is not None and (grids[:, 1:] % inputs.merge_size).any():
        return f"{grid} has a height or width that is no multiple of {inputs.merge_size}, which the model merges"
    token, wanted = placeholder_ids(inputs)[grid], int(num_patches) // inputs.merge_size**2
    found = int(np.count_nonzero(prompt_ids == token))
    if found != wanted:
        return f"the prompt has {found} placeholder tokens {token} where {grid} describes {wanted}"
    return ""


def _positions_problem(tensors: Mapping[str, Array], num_tokens: int, inputs: MediaInputs | None) -> str:
    if not tensors.keys() & PIXEL_GRIDS.keys():
        return f"{', '.join(tensors)} came without an image or a video"
    positions = tensors.get(POSITION_IDS)
    if positions is None or positions.shape != (3, num_tokens):
        given = "none" if positions is None else list(positions.shape)
        return f"{POSITION_IDS} are {given} instead of [3, {num_tokens}]"
    limit = inputs.num_positions if inputs is not None and inputs.num_positions else MAX_POSITION
    if positions.size and not (positions.min() >= 0 and positions.max() < limit):
        return f"{POSITION_IDS} are from {positions.min()} to {positions.max()}, and the model has {limit}"
    return ""
