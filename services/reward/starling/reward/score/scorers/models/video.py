"""Videos as the vision-language models of the Qwen2-VL family read them: sampled frames, cut into patches.

Written from their configuration and documentation, with numpy and Pillow: transformers wants torchvision for videos.
The elements of a patch are in the order [channel, frame, row, column], and patches in that of the blocks that the model
merges: [frames, block row, block column, row in block, column in block].
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

MAX_ASPECT: Final = 200.0
"""Of height and width; the models know no more."""


class PatchForm(NamedTuple):
    """How a model cuts frames, as its `preprocessor_config.json` has it."""

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def factor(self) -> int:
        """Height and width are multiples of it."""
        return self.patch_size * self.merge_size


class Patches(NamedTuple):
    """A video."""

    values: npt.NDArray[np.float32]
    """[patch, element]."""
    grid: tuple[int, int, int]
    """Patches in time, height and width."""


def sampled_frames(pixels: npt.NDArray[np.uint8], max_frames: int, multiple: int) -> tuple[npt.NDArray[np.uint8], int]:
    """Return every n-th frame of a video, so that there are at most `max_frames`, and n.

    Frames beyond a multiple of `multiple` are dropped; where there are fewer, the last one is repeated.
    """
    interval = (len(pixels) - 1) // max_frames + 1
    frames = pixels[::interval]
    if len(frames) < multiple:
        return np.concatenate([frames, np.repeat(frames[-1:], multiple - len(frames), axis=0)]), interval
    return frames[: len(frames) // multiple * multiple], interval


def fitted_size(height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Return multiples of `factor` near height and width whose product is within the limits.

    Raises ValueError when the sides differ too much.
    """
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise ValueError(f"the frames have {height} x {width} pixels; one side may be {MAX_ASPECT:g} times the other")
    rows, columns = (max(factor, round(side / factor) * factor) for side in (height, width))
    if rows * columns > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        rows, columns = (max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))
    elif rows * columns < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        rows, columns = (math.ceil(side * grow / factor) * factor for side in (height, width))
    return rows, columns


def patches_of(frames: npt.NDArray[np.uint8], size: tuple[int, int], form: PatchForm) -> Patches:
    """Return the patches of frames [T, H, W, 3], resized to `size`; T is a multiple of the temporal patch size."""
    rows, columns = size
    resized = np.stack(
        [np.asarray(Image.fromarray(one).resize((columns, rows), Image.Resampling.BICUBIC)) for one in frames]
    )
    scaled = (resized.astype(np.float32) / 255.0 - np.array(form.mean, np.float32)) / np.array(form.std, np.float32)
    side, block, depth = form.patch_size, form.merge_size, form.temporal_patch_size
    grid = (len(frames) // depth, rows // side, columns // side)
    blocks = scaled.reshape(grid[0], depth, grid[1] // block, block, side, grid[2] // block, block, side, 3)
    ordered = blocks.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return Patches(np.ascontiguousarray(ordered.reshape(math.prod(grid), -1), dtype=np.float32), grid)
