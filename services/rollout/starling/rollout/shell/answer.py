"""A finished group as a message with its buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from starling.common.wire.messages import GroupGenerated, TensorMeta, TrajectoryMeta

if TYPE_CHECKING:
    from starling.rollout.engine.base import GroupResult


def answer_of(result: GroupResult, decode: Callable[[Sequence[int]], str]) -> tuple[GroupGenerated, tuple[bytes, ...]]:
    """Return the message for `result`, and its buffers: prompt ids, token ids, log-probabilities, versions."""
    completions = result.completions
    arrays: list[npt.NDArray[Any]] = [
        result.prompt_ids.astype(np.int32, copy=False),
        np.concatenate([c.token_ids for c in completions]),
        np.concatenate([c.logprobs for c in completions]),
        np.concatenate([c.versions for c in completions]),
    ]
    trajectories = tuple(
        TrajectoryMeta(
            status=c.status,
            num_tokens=len(c.token_ids),
            text=decode(c.token_ids.tolist()),
            oldest_version=int(c.versions.min()),
            newest_version=int(c.versions.max()),
        )
        for c in completions
    )
    tensors = tuple(TensorMeta(dtype=a.dtype.name, shape=a.shape, nbytes=a.nbytes) for a in arrays)
    return GroupGenerated(lease=result.lease, trajectories=trajectories, tensors=tensors), tuple(
        a.tobytes() for a in arrays
    )
