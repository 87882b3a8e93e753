"""Latents that come with a group of a run: whether they are what the message says, and the samples' media. Pure.

The message and its buffer are of a peer, which may be wrong: what is not as it should be is refused before it is
stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from starling.common.wire.messages import ScoreGroup, TensorMeta
from starling.common.wire.tensors import LATENTS, OUTER_DIMS, SAMPLE_DIMS, STORED_BYTES
from starling.reward.core.media import MediaForm

MAX_SHOWN: Final = 40
"""Characters of a name, and dimensions of a shape, of a peer that a sentence shows."""


class LatentsError(Exception):
    """Latents that cannot be scored; the text is a sentence."""


def latents_form(message: ScoreGroup, buffers: Sequence[bytes]) -> MediaForm | None:
    """Return the form [C, T, H, W] of the latents of each completion of a group; None if it has none.

    Those of an image, [C, H, W], become [C, 1, H, W]. Their numbers need not be finite: what a scorer or a decoder
    cannot do with them is a failure of its own.

    Args:
        message: the group.
        buffers: that came with it.

    Raises:
        LatentsError: the tensors are not those of the message, or no latents of its completions.
    """
    tensors = message.tensors
    if len(tensors) != len(buffers):
        raise LatentsError(f"The group came with {len(buffers)} buffers for {len(tensors)} tensors.")
    if not tensors:
        return None
    if len(tensors) > 1 or tensors[0].name != LATENTS:
        names = ", ".join(repr(one.name[:MAX_SHOWN]) for one in tensors[:MAX_SHOWN])
        raise LatentsError(f"The group came with the tensors {names}, and only {LATENTS!r} are scored.")
    (meta,), (buffer,) = tensors, buffers
    _check(meta, len(message.completions), len(buffer))
    _, *shape = meta.shape
    if len(shape) == min(SAMPLE_DIMS):
        shape.insert(1, 1)
    return MediaForm("latents", meta.dtype, tuple(shape))


def _check(meta: TensorMeta, num_completions: int, num_bytes: int) -> None:
    """Raise LatentsError unless a tensor of latents is one, of so many completions, in so many bytes."""
    if meta.dtype not in STORED_BYTES:
        known = " or ".join(STORED_BYTES)
        raise LatentsError(
            f"The latents of the group have dtype {meta.dtype[:MAX_SHOWN]!r}, and only {known} is scored."
        )
    shape = list(meta.shape[:MAX_SHOWN])
    if len(meta.shape) - OUTER_DIMS[LATENTS] not in SAMPLE_DIMS or min(meta.shape) < 1:
        raise LatentsError(
            f"The latents of the group have shape {shape}, and should have [completions, C, H, W] or "
            "[completions, C, T, H, W] without a 0."
        )
    if meta.shape[0] != num_completions:
        raise LatentsError(f"The group has {num_completions} completions and latents of {meta.shape[0]}.")
    size_bytes = math.prod(meta.shape) * STORED_BYTES[meta.dtype]
    if not size_bytes == meta.nbytes == num_bytes:
        raise LatentsError(
            f"The latents of the group came in {num_bytes} bytes, and {meta.dtype}{shape} takes {size_bytes}."
        )
