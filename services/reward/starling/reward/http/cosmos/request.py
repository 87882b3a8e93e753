"""From the body of `enqueue` to the core's request."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from starling.common.wire.messages import CompletionText, Status
from starling.reward.core.media import NUM_COLOURS, MediaForm, MediaRow, MediaTensor
from starling.reward.core.requests import RewardRequest
from starling.reward.core.samples import PromptText, Sample
from starling.reward.http.cosmos.enqueue import (
    Array,
    EnqueueHeader,
    Media,
    frame_rates,
    own_metadata,
    read_header,
    read_media,
    shared_metadata,
    split_body,
)
from starling.reward.http.errors import HttpError
from starling.reward.http.schema import OBJECT_BYTES
from starling.reward.score.workers.places import offsets_of, padded
from starling.reward.score.workers.shared import MediaMemory

TYPES, PUSHED, INPUT_INFO = "types", "pushed", "input_info"
"""Keys of what is kept with a request: the names of its types, those that workers push, and `input_info`."""
MAX_METADATA_BYTES: Final = 64 << 20
"""Of all prompts of a request, as workers get them: messages to these have a limit, too."""


class Enqueued(NamedTuple):
    """A body that can be scored."""

    request: RewardRequest
    info: dict[str, Any]
    """What is kept with it, for the pulls."""


class KnownTypes(NamedTuple):
    """Types of rewards that a request may ask for."""

    scorers: Mapping[str, int]
    """The indices of the scorers by the types that name them."""
    pushed: Collection[str]
    """Types that reward workers push."""
    shown: Sequence[str]
    """Those that an error names."""
    of_texts: Collection[str] = ()
    """Types of scorers that read completions, of which these requests have none."""


def read_enqueue(data: bytes, id: str, types: KnownTypes, memory: MediaMemory) -> Enqueued:
    """Read the body of a request.

    Args:
        data: the body.
        id: of the request.
        types: what it may ask for.
        memory: takes the media.

    Raises:
        HttpError: 422, with what is wrong with it.
        TooManyBuffersError: there is no room for its media now.
    """
    line, rest = split_body(data)
    header = read_header(line)
    scorers = types.scorers
    unknown = [name for name in header.types if name not in scorers and name not in types.pushed]
    if unknown:
        shown = ", ".join(types.shown)
        raise HttpError(422, f"there is no scorer {unknown[0]!r} here; `reward_fn` may have {shown}")
    for name in header.types:
        if name in types.of_texts:
            raise HttpError(422, needs_text(name))
    rates = frame_rates(header)
    media = read_media(header, rest)
    info = {
        TYPES: [name for name in header.types if name in scorers],
        PUSHED: [name for name in header.types if name not in scorers],
        INPUT_INFO: media.info,
    }
    try:
        prompts, samples = _samples(header)
        msgspec.msgpack.encode(info)
    except (ValueError, OverflowError, TypeError, RecursionError) as error:
        raise HttpError(422, f"a prompt or its metadata cannot be encoded: {error}") from None
    only = tuple(sorted({scorers[name] for name in info[TYPES]}))
    if media.is_still:
        rates = (0.0,) * len(rates)
    with_media, tensors = _with_media(samples, media, rates, memory)
    return Enqueued(RewardRequest(id, prompts, with_media, only=only, media=tensors), info)


def needs_text(type: str) -> str:
    """Return why a scorer that reads completions gives no scores here."""
    return (
        f"scorer {type!r} reads the texts of completions, and a request of this route has only prompts and media; "
        "leave it out of `reward_fn`, and send texts to /v1/rewards"
    )


def _samples(header: EnqueueHeader) -> tuple[tuple[PromptText, ...], list[Sample]]:
    """Return the prompts, each once, and the samples without their media. Raises HttpError, and what msgspec does."""
    shared = shared_metadata(header)
    size_bytes = len(msgspec.msgpack.encode(shared)) + OBJECT_BYTES * len(shared)
    numbers: dict[bytes, int] = {}
    distinct: list[tuple[str, dict[str, Any]]] = []
    samples = []
    for index, text in enumerate(header.prompts):
        prompt = text, own_metadata(header, index)
        number = numbers.setdefault(msgspec.msgpack.encode(prompt, order="deterministic"), len(distinct))
        if number == len(distinct):
            distinct.append(prompt)
        samples.append(Sample(index, number, CompletionText(text="", status=Status.OK, num_tokens=0)))
    if size_bytes * len(distinct) > MAX_METADATA_BYTES:
        raise HttpError(
            422,
            f"the further fields take {size_bytes / (1 << 20):.2g} MiB, and each of the {len(distinct)} prompts gets "
            f"them, which is more than {MAX_METADATA_BYTES >> 20} MiB; send fewer prompts at a time, or less",
        )
    # One object for all samples, where they are alike.
    return tuple(PromptText(text, "", {**shared, **own} if own else shared) for text, own in distinct), samples


def _with_media(
    samples: list[Sample], media: Media, rates: tuple[float, ...], memory: MediaMemory
) -> tuple[tuple[Sample, ...], tuple[MediaTensor, ...]]:
    """Return the samples and their tensors: one for each run of samples with equal frame rates."""
    shape = media.array.shape[1:]
    runs: list[tuple[MediaForm, list[int]]] = []
    """Form, and the indices of the samples."""
    found: list[Sample] = []
    for rate, run in groupby(range(len(samples)), rates.__getitem__):
        indices = list(run)
        for row, index in enumerate(indices):
            found.append(msgspec.structs.replace(samples[index], media=MediaRow(len(runs), row)))
        runs.append((MediaForm(media.kind, media.dtype, shape, rate), indices))
    offsets, _ = offsets_of(form.size_bytes * len(indices) for form, indices in runs)
    buffer = memory.share(padded((_bytes_of(media.array[index]) for index in indices) for _, indices in runs))
    tensors = [
        MediaTensor(form, len(indices), buffer, offset) for (form, indices), offset in zip(runs, offsets, strict=True)
    ]
    return tuple(found), tuple(tensors)


def _bytes_of(sample: Array) -> memoryview:
    """Return the media of a sample, without a copy where they are in C order."""
    return _in_order(sample).reshape(-1).view(np.uint8).data


def _in_order(sample: Array) -> Array:
    """Return the media of a sample in C order; pixels whose channels came first, channel by channel: it is fast."""
    if sample.flags.c_contiguous:
        return sample
    if sample.shape[-1] == NUM_COLOURS and sample.dtype == np.uint8:
        return np.stack([sample[..., colour] for colour in range(NUM_COLOURS)], axis=-1)
    return np.ascontiguousarray(sample)
