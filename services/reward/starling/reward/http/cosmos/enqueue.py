"""Body of `enqueue`: one line of JSON, a line feed, and the media of all samples as one `.npy` file.

    {"prompts": ["a cat"], "reward_fn": {"dance_grpo": 1.0}, "media_type": "video", "video_infos": [{"video_fps": 16}]}
    \\x93NUMPY...

What the array holds follows from its shape more than from `media_type`: clients of early 2026 send latents as "video",
and those before them name no type at all.

    [B, H, W, 3] uint8            images
    [B, 3, T, H, W] uint8         videos, whatever their type
    [B, C, T, H, W] of floats     latents; as uint8 they are the bytes of bfloat16, so that W is halved
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from starling.reward.core.media import KIND_DTYPES, MAX_FPS, NUM_COLOURS, MediaKind
from starling.reward.http.errors import HttpError
from starling.reward.http.npy import NpyArray, NpyError, read_npy
from starling.reward.http.schema import MAX_DEPTH, is_deeper, read_json
from starling.reward.http.stores.store import MAX_SAMPLES
from starling.reward.score.workers.arrays import as_float32, stored_dtype

MAX_LINE_BYTES: Final = 8 << 20
"""Of the line of JSON."""
MAX_TYPES: Final = 64
"""Of `reward_fn`."""
DEFAULT_FPS: Final = 16.0
LATENT_CHANNELS: Final = (16, 48)
"""Of the VAEs of Wan 2.1 and 2.2, by which early clients' latents are told from videos."""
PER_SAMPLE: Final = ("geneval_tags", "geneval_includes")
"""Further fields with one element for each sample."""

Array = npt.NDArray[Any]
TypeName = Annotated[str, Field(min_length=1, max_length=200)]
Weight = Annotated[float, Field(allow_inf_nan=False)]


class EnqueueHeader(BaseModel):
    """The line of JSON. What has no field here is passed to the scorers as metadata of each sample."""

    model_config = ConfigDict(extra="allow", strict=True)

    prompts: Annotated[list[str], Field(min_length=1, max_length=MAX_SAMPLES)]
    reward_fn: Annotated[dict[TypeName, Weight], Field(max_length=MAX_TYPES)]
    """Weights of the types to score. Those of 0 or less are left out; others are the client's to apply."""
    video_infos: list[dict[str, Any]] | None = None
    media_type: Any = None

    @property
    def types(self) -> tuple[str, ...]:
        """The types to score."""
        return tuple(name for name, weight in self.reward_fn.items() if weight > 0)


class Media(NamedTuple):
    """The media of a request, as the scorers' side has them."""

    kind: MediaKind
    dtype: str
    """numpy's name; that of bfloat16, whose bits are in an array of uint16."""
    array: Array
    """Pixels [B, T, H, W, 3] of uint8; latents [B, C, T, H, W] of floats."""
    info: dict[str, Any]
    """What the result says of it as `input_info`."""
    is_still: bool = False
    """Whether it is images."""


def split_body(data: bytes) -> tuple[bytes, memoryview]:
    """Return the line of JSON and the bytes after it. Raises HttpError when there is no line."""
    end = data.find(b"\n", 0, MAX_LINE_BYTES + 1)
    if end < 0:
        raise HttpError(
            422,
            f"the body has no line feed within its first {MAX_LINE_BYTES >> 20} MiB; send one line of JSON, a line "
            "feed, and a .npy file",
        )
    return data[:end], memoryview(data)[end + 1 :]


def read_header(line: bytes) -> EnqueueHeader:
    """Read the line of JSON. Raises HttpError."""
    header = read_json(line, EnqueueHeader, "the first line", "the first line is no description of samples")
    if not header.types:
        raise HttpError(422, "`reward_fn` has no weight above 0, so there is nothing to score; name a type")
    if is_deeper(header.model_extra, MAX_DEPTH) or is_deeper(header.video_infos, MAX_DEPTH):
        raise HttpError(422, f"the first line is nested more than {MAX_DEPTH} deep")
    num = len(header.prompts)
    for name in ("video_infos", *PER_SAMPLE):
        values = getattr(header, name, None)
        if values is not None and (not isinstance(values, list) or len(values) != num):
            raise HttpError(422, f"`{name}` must be a list with one element for each of the {num} prompts")
    return header


def frame_rates(header: EnqueueHeader) -> tuple[float, ...]:
    """Return the frames per second of each sample. Raises HttpError."""
    if header.video_infos is None:
        return (DEFAULT_FPS,) * len(header.prompts)
    return tuple(_frame_rate(index, info) for index, info in enumerate(header.video_infos))


def shared_metadata(header: EnqueueHeader) -> dict[str, Any]:
    """Return what scorers get as metadata of all samples: the fields that are none of the header's own."""
    return {name: value for name, value in (header.model_extra or {}).items() if not _is_per_sample(name, value)}


def own_metadata(header: EnqueueHeader, index: int) -> dict[str, Any]:
    """Return what scorers get as metadata of one sample, besides those of all."""
    extras = header.model_extra or {}
    return {name: extras[name][index] for name in PER_SAMPLE if _is_per_sample(name, extras.get(name))}


def _is_per_sample(name: str, value: Any) -> bool:
    return name in PER_SAMPLE and bool(value)


def read_media(header: EnqueueHeader, data: memoryview) -> Media:
    """Return the media in the bytes after the line of JSON. Raises HttpError when they are none.

    Args:
        header: says of what type they should be, and how many.
        data: a `.npy` file. What `torch.save` writes is refused: only code can read it.
    """
    try:
        found = read_npy(data)
    except NpyError as error:
        raise HttpError(422, f"the bytes after the first line feed: {error}") from None
    num, shape = len(header.prompts), found.header.shape
    if not shape or shape[0] != num:
        raise HttpError(422, f"the array has the shape {list(shape)}; its first dimension must be the {num} prompts")
    if 0 in shape:
        raise HttpError(422, f"the array has the shape {list(shape)}, which holds nothing; send media")
    array, dtype = _array(found), found.header.dtype
    is_image = str(header.media_type).lower() == "image"
    if is_image or len(shape) != 5:
        media = _images(array, dtype, is_image=is_image)
    elif shape[1] == NUM_COLOURS:
        media = _videos(array, dtype)
    else:
        media = _latents(array, dtype, header.media_type)
    if header.video_infos is not None:
        media.info["video_infos"] = header.video_infos
    return media


def _array(npy: NpyArray) -> Array:
    """Return the array, of uint16 for bfloat16, as a view of the file's bytes."""
    _, shape, is_fortran, _ = npy.header
    return np.frombuffer(npy.data, stored_dtype(npy.header.dtype)).reshape(shape, order="F" if is_fortran else "C")


def _images(array: Array, dtype: str, *, is_image: bool) -> Media:
    if not is_image:
        raise HttpError(
            422,
            f"the array has the shape {list(array.shape)}; videos and latents have five dimensions, [B, C, T, H, W], "
            'and images, [B, H, W, 3], are sent with "media_type": "image"',
        )
    if array.ndim != 4 or array.shape[3] != NUM_COLOURS or dtype != "uint8":
        raise HttpError(422, f"images are uint8 of the shape [B, H, W, 3], not {dtype} of {list(array.shape)}")
    return Media("pixels", dtype, array[:, np.newaxis], _info(array, dtype, _range(array)), is_still=True)


def _videos(array: Array, dtype: str) -> Media:
    if dtype != "uint8":
        raise HttpError(422, f"an array of three channels holds the pixels of videos, uint8 of 0 to 255, not {dtype}")
    return Media("pixels", dtype, array.transpose(0, 2, 3, 4, 1), _info(array, dtype, _range(array)))


def _latents(array: Array, dtype: str, media_type: object) -> Media:
    if str(media_type).lower() == "video" and array.shape[1] not in LATENT_CHANNELS:
        raise HttpError(
            422,
            f"the array has {array.shape[1]} channels; videos have 3, and latents that are sent as a video 16 or 48: "
            'send others with "media_type": "latent"',
        )
    if dtype == "uint8":
        if array.shape[4] % 2:
            raise HttpError(
                422, f"latents of uint8 are bytes of bfloat16, of which {array.shape[4]} are no whole number"
            )
        array, dtype = np.ascontiguousarray(array).view("<u2"), "bfloat16"
    elif dtype == "float64":
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused below
            array, dtype = array.astype("<f4"), "float32"
    if dtype not in KIND_DTYPES["latents"]:
        raise HttpError(
            422, f"latents are float16, float32, float64, or the bytes of bfloat16 as uint8, not {dtype}; convert them"
        )
    # As float32, also float16, of which numpy finds the least one ten times as fast.
    bounds = _range(as_float32(sample, dtype) for sample in array)
    if not all(map(math.isfinite, bounds)):  # so that they need not be read again for `are_finite`
        raise HttpError(422, "the latents have NaN or infinities; send finite numbers")
    return Media("latents", dtype, array, _info(array, dtype, bounds))


def _range(samples: Iterable[Array]) -> tuple[float, float]:
    """Return the least and the greatest of all numbers, one sample at a time; NaN if there is one."""
    bounds = [(sample.min(), sample.max()) for sample in samples]
    return float(np.min([low for low, _ in bounds])), float(np.max([high for _, high in bounds]))


def _info(array: Array, dtype: str, bounds: tuple[float, float]) -> dict[str, Any]:
    low, high = bounds
    return {"shape": list(array.shape), "dtype": f"torch.{dtype}", "min": f"{low:.3f}", "max": f"{high:.3f}"}


def _frame_rate(index: int, info: dict[str, Any]) -> float:
    value = info.get("video_fps", info.get("fps", DEFAULT_FPS))
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_FPS:
        raise HttpError(
            422,
            f"the `video_fps` of sample {index} must be a number above 0 and at most {MAX_FPS:g}, not {value!r:.100}",
        )
    return float(value)
