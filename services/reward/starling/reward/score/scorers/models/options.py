"""Checks of the options of reward models, and the frames of a clip that a model of images sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from starling.common.errors import ConfigError

MAX_FRAMES: Final = 64


def model_folder(scorer: str, path: str, model: str) -> Path:
    """Return the folder of a model. Raises ConfigError when there is none.

    Args:
        scorer: its name.
        path: the folder, as given.
        model: the name of the model on the Hugging Face Hub, for the error.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"Scorer {scorer!r}: {path!r} is no folder; download {model} and give its folder.")
    return folder


def check_range(scorer: str, name: str, value: float, least: float, most: float) -> None:
    """Raise ConfigError unless an option is within its limits."""
    if not least <= value <= most:
        raise ConfigError(f"Scorer {scorer!r}: {name} is {value}; give {least:g} to {most:g}.")


def checked_num_frames(scorer: str, num_frames: int) -> int:
    """Return the number of frames of a video that are scored. Raises ConfigError unless it is within its limits."""
    check_range(scorer, "num_frames", num_frames, 1, MAX_FRAMES)
    return num_frames


def downloaded_file(folder: str, *place: str) -> Path | None:
    """Return a file that Cosmos-RL downloads into `folder`; None without a folder, or if it is not there."""
    file = Path(folder).expanduser().joinpath(*place)
    return file if folder and file.is_file() else None


def without_empty(**options: str) -> dict[str, str]:
    """Return the options that are given: a package has a default of its own for the others."""
    return {name: value for name, value in options.items() if value}


def frame_means(
    clips: Sequence[Any], num_frames: int, score: Callable[[list[Any], list[int]], Sequence[float]]
) -> list[float]:
    """Return the mean score of some frames of each clip.

    Args:
        clips: pixels [T, H, W, 3]; an image has T = 1.
        num_frames: how many frames of a longer clip are scored, evenly spaced.
        score: from frames [H, W, 3], and the indices of their clips, to the score of each frame.
    """
    frames, owners = list[Any](), list[int]()
    for index, pixels in enumerate(clips):
        num = min(num_frames, len(pixels))
        frames += [pixels[number * len(pixels) // num] for number in range(num)]
        owners += [index] * num
    sums, counts = [0.0] * len(clips), [0] * len(clips)
    for found, index in zip(score(frames, owners), owners, strict=True):
        sums[index] += float(found)
        counts[index] += 1
    return [total / count for total, count in zip(sums, counts, strict=True)]
