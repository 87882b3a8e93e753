"""Media of the samples of a request, from `.npy` files in base64 to one sealed buffer."""

from __future__ import annotations

import binascii
import math
import mmap
import struct
from collections.abc import Iterator, Sequence
from typing import Annotated, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from starling.reward.core.media import MAX_FPS, NUM_COLOURS, MediaForm, MediaRow, MediaTensor, form_problem
from starling.reward.http.errors import HttpError
from starling.reward.http.npy import MAX_DATA_BEGIN, NpyError, NpyHeader, read_header
from starling.reward.score.workers.places import offsets_of, padded
from starling.reward.score.workers.shared import MediaMemory, SharedBuffer, TooManyBuffersError

RETRY_AFTER_S: Final = 1
_PART_CHARACTERS: Final = 4 << 18
"""Of base64 that are decoded at a time; a multiple of four."""
_HEADER_CHARACTERS: Final = -(-MAX_DATA_BEGIN // 3) * 4


class MediaBody(BaseModel):
    """Images, videos or latents that a completion is."""

    model_config = ConfigDict(extra="forbid", strict=True)

    kind: Literal["pixels", "latents"]
    npy: str
    """A `.npy` file in base64: pixels uint8 [T, H, W, 3] or [H, W, 3], latents [C, T, H, W] in floating point."""
    fps: Annotated[float, Field(ge=0.0, le=MAX_FPS, allow_inf_nan=False, strict=False)] = 0.0
    """Frames per second of the pixels; 0 if not known."""


class SharedMedia(NamedTuple):
    """Media of the samples of a request."""

    tensors: tuple[MediaTensor, ...]
    rows: tuple[MediaRow | None, ...]
    """Of each sample where its media are; None without media."""


class _File(NamedTuple):
    sample: int
    form: MediaForm
    text: str
    header: NpyHeader

    def contents(self) -> Iterator[bytes | memoryview]:
        """Yield the elements in C order."""
        return _in_c_order(self) if self.header.is_fortran else _elements(self)


class _TokenIds(NamedTuple):
    sample: int
    form: MediaForm
    ids: Sequence[int]

    def contents(self) -> Iterator[bytes]:
        """Yield the numbers."""
        yield struct.pack(f"<{len(self.ids)}i", *self.ids)


def share_media(bodies: Sequence[MediaBody | Sequence[int] | None], memory: MediaMemory) -> SharedMedia:
    """Return the media of samples, in one buffer of `memory`.

    Args:
        bodies: of each sample its media, or its token ids.
        memory: has the buffers.

    Raises:
        HttpError: a file is not valid (422), or there are too many buffers (429).
    """
    files = [_read(index, body) for index, body in enumerate(bodies) if body is not None]
    if not files:
        return SharedMedia((), (None,) * len(bodies))
    by_form: dict[MediaForm, list[_File | _TokenIds]] = {}
    for file in files:
        by_form.setdefault(file.form, []).append(file)
    buffer = share(memory, _contents(by_form))
    offsets, _ = offsets_of(len(same) * form.size_bytes for form, same in by_form.items())
    tensors = list[MediaTensor]()
    rows: list[MediaRow | None] = [None] * len(bodies)
    for number, ((form, same), offset) in enumerate(zip(by_form.items(), offsets, strict=True)):
        tensors.append(MediaTensor(form, len(same), buffer, offset))
        for row, file in enumerate(same):
            rows[file.sample] = MediaRow(number, row)
    for number, row in check_finite(tensors):
        index = rows.index(MediaRow(number, row))
        raise HttpError(422, f"the latents of sample {index} have infinities or NaN; send finite numbers")
    return SharedMedia(tuple(tensors), tuple(rows))


def share(memory: MediaMemory, parts: Iterator[bytes | memoryview]) -> SharedBuffer:
    """Return a buffer with these bytes. Raises HttpError (429) when none can be had."""
    try:
        return memory.share(parts)
    except TooManyBuffersError as error:
        raise HttpError(429, f"{error}; try again later", retry_after_s=RETRY_AFTER_S) from None


def check_finite(tensors: Sequence[MediaTensor]) -> Iterator[tuple[int, int]]:
    """Yield the tensors, by their indices, and rows of latents with infinities or NaN."""
    for number, tensor in enumerate(tensors):
        if tensor.form.kind == "latents":
            assert isinstance(tensor.buffer, SharedBuffer)
            with mmap.mmap(tensor.buffer.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) as mapped:
                bad = [row for row in range(tensor.num) if not _is_finite(mapped, tensor.offset_of(row), tensor.form)]
            yield from ((number, row) for row in bad)


def _read(index: int, body: MediaBody | Sequence[int]) -> _File | _TokenIds:
    """Return the media of a sample; of a file the header is read. Raises HttpError."""
    if not isinstance(body, MediaBody):
        return _TokenIds(index, MediaForm("token_ids", "int32", (len(body),)), body)
    text = body.npy
    if len(text) % 4 or not text.isascii() or text.find("=", 0, len(text) - 2) >= 0:
        raise HttpError(422, f"media.npy of sample {index} is no base64; send it with padding, without line breaks")
    try:
        header = read_header(_decoded(text[:_HEADER_CHARACTERS], index))
        header.check_length(len(text) // 4 * 3 - text[-2:].count("="))
    except NpyError as error:
        raise HttpError(422, f"media.npy of sample {index}: {error}") from None
    shape = header.shape
    if body.kind == "pixels" and len(shape) == 3 and shape[-1] == NUM_COLOURS:
        shape = (1, *shape)  # an image
    form = MediaForm(body.kind, header.dtype, shape, body.fps)
    if problem := form_problem(form):
        raise HttpError(422, f"the {body.kind} of sample {index} {problem}")
    return _File(index, form, text, header)


def _contents(by_form: dict[MediaForm, list[_File | _TokenIds]]) -> Iterator[bytes | memoryview]:
    """Yield the elements of all media, those of one form after another."""
    yield from padded((part for file in files for part in file.contents()) for files in by_form.values())
    if not any(form.size_bytes for form in by_form):  # empty token ids only, and an empty buffer cannot be mapped
        yield bytes(1)


def _elements(file: _File) -> Iterator[memoryview]:
    skipped = file.header.data_begin
    for begin in range(0, len(file.text), _PART_CHARACTERS):
        part = memoryview(_decoded(file.text[begin : begin + _PART_CHARACTERS], file.sample))
        yield part[skipped:]
        skipped = max(0, skipped - len(part))


def _in_c_order(file: _File) -> Iterator[bytes]:
    import numpy as np  # few clients send such files, and a service for texts has none

    whole = b"".join(_elements(file))
    size = len(whole) // math.prod(file.form.shape)
    yield np.frombuffer(whole, f"V{size}").reshape(file.header.shape, order="F").tobytes(order="C")


def _decoded(text: str, index: int) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except binascii.Error as error:
        raise HttpError(422, f"media.npy of sample {index} is no base64: {error}") from None


def _is_finite(buffer: mmap.mmap, offset: int, form: MediaForm) -> bool:
    """Whether all numbers of the latents at `offset` are finite."""
    import numpy as np  # a service for texts, or pixels, has none

    from starling.reward.score.workers.arrays import are_finite, stored_dtype

    return are_finite(np.frombuffer(buffer, stored_dtype(form.dtype), math.prod(form.shape), offset), form.dtype)
