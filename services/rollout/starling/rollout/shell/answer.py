"""What the engine and the puller have to say, as messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from starling.common.wire.messages import GroupGenerated, LeaseProgress, TensorMeta, TrajectoryMeta

if TYPE_CHECKING:
    from starling.rollout.engine.base import GroupResult
    from starling.weightsync.execute.transfer import Progress


def answer_of(
    result: GroupResult, decode: Callable[[Sequence[int]], str], temperature: float = -1.0
) -> tuple[GroupGenerated, tuple[bytes, ...]]:
    """Return the message for `result`, and its buffers: prompt ids, token ids, log-probabilities, versions, and by name
    what its images and videos need.

    `temperature` is that of the request; -1 where it is not known.
    """
    completions = result.completions
    arrays: list[tuple[str, npt.NDArray[Any]]] = [
        ("", result.prompt_ids.astype(np.int32, copy=False)),
        ("", np.concatenate([c.token_ids for c in completions])),
        ("", np.concatenate([c.logprobs for c in completions])),
        ("", np.concatenate([c.versions for c in completions])),
        *result.tensors.items(),
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
    tensors = tuple(TensorMeta(dtype=a.dtype.name, shape=a.shape, nbytes=a.nbytes, name=name) for name, a in arrays)
    generated = GroupGenerated(lease=result.lease, trajectories=trajectories, tensors=tensors, temperature=temperature)
    return generated, tuple(a.tobytes() for _, a in arrays)


def progress_of(progress: Progress) -> LeaseProgress:
    """Return how far a pull is as a heartbeat tells it; an infinite time left is one that is not known yet."""
    return LeaseProgress(
        bytes_done=progress.bytes_done,
        bytes_total=progress.bytes_total,
        seconds_left=progress.seconds_left if math.isfinite(progress.seconds_left) else None,
    )
