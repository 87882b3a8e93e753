"""Wire messages of generated, played and interrupted groups, and the partial completions in an order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from starling.algo.routing import Experts, join_experts
from starling.algo.truncation import KeptTokens, join_kept, mean_nats
from starling.common.wire.messages import (
    GenerateGroup,
    GroupGenerated,
    GroupInterrupted,
    LeaseProgress,
    PartialCompletionMeta,
    TensorMeta,
    TrajectoryMeta,
)
from starling.common.wire.tensors import KEPT_COUNTS, KEPT_IDS, PROMPT_ROUTING, ROUTING, ROUTING_FORMS

if TYPE_CHECKING:
    from starling.rollout.engine.base import GroupResult, PartialCompletion
    from starling.rollout.env.episodes.trajectory import PlayedGroup, Trajectory
    from starling.weightsync.puller.report import PullProgress

NamedArrays = list[tuple[str, npt.NDArray[Any]]]
DTYPES: tuple[np.dtype[Any], ...] = (np.dtype("<i4"), np.dtype("<f4"), np.dtype("<i4"))
"""Element types of a partial completion's token ids, log-probabilities and weight versions."""


def generated_message(
    result: GroupResult, decode: Callable[[Sequence[int]], str], temperature: float = -1.0
) -> tuple[GroupGenerated, tuple[bytes, ...]]:
    """Return the message for `result`, and its buffers: prompt ids, token ids, log-probabilities, versions, and the
    named tensors of its images and videos, of its kept tokens, and of the experts of its tokens.

    `temperature` is the request's; -1 if unknown.
    """
    completions = result.completions
    arrays: NamedArrays = [
        ("", result.prompt_ids.astype(np.int32, copy=False)),
        ("", np.concatenate([c.token_ids for c in completions])),
        ("", np.concatenate([c.logprobs for c in completions])),
        ("", np.concatenate([c.versions for c in completions])),
        *result.tensors.items(),
        *_kept_arrays(join_kept((c.kept, len(c.token_ids)) for c in completions)),
        *_routing_arrays(
            (result.prompt_routing, len(result.prompt_ids)), [(c.routing, len(c.token_ids)) for c in completions]
        ),
    ]
    _, versions = arrays[3]
    begins = np.cumsum([0, *(len(c.token_ids) for c in completions[:-1])])
    oldest, newest = np.minimum.reduceat(versions, begins), np.maximum.reduceat(versions, begins)
    trajectories = tuple(
        TrajectoryMeta(
            status=completion.status,
            num_tokens=len(completion.token_ids),
            text=decode(completion.token_ids.tolist()),
            oldest_version=old,
            newest_version=new,
            truncation_nats=mean_nats((completion.truncation_nats,)),
        )
        for completion, old, new in zip(completions, oldest.tolist(), newest.tolist(), strict=True)
    )
    tensors, buffers = _frames(arrays)
    generated = GroupGenerated(lease=result.lease, trajectories=trajectories, tensors=tensors, temperature=temperature)
    return generated, buffers


def interrupted_message(
    lease: str, partials: Sequence[PartialCompletion], reason: str, temperature: float = -1.0, *, lost: bool = False
) -> tuple[GroupInterrupted, tuple[bytes, ...]]:
    """Return the message that hands a group over to another replica, and its buffers: the partial completions.

    `lost`: the engine died with the group in it.
    """
    if not any(len(partial.token_ids) for partial in partials):
        return GroupInterrupted(lease=lease, reason=reason, partial=(), tensors=(), lost=lost), ()
    columns = zip(*((p.token_ids, p.logprobs, p.versions) for p in partials), strict=True)
    columns_and_dtypes = zip(columns, DTYPES, strict=True)
    arrays: NamedArrays = [("", np.concatenate(column).astype(dtype)) for column, dtype in columns_and_dtypes]
    arrays += _kept_arrays(join_kept((p.kept, len(p.token_ids)) for p in partials))
    if (experts := join_experts((p.routing, len(p.token_ids)) for p in partials)) is not None:
        arrays.append((ROUTING, experts))
    tensors, buffers = _frames(arrays)
    metas = tuple(
        PartialCompletionMeta(num_tokens=len(partial.token_ids), status=partial.status) for partial in partials
    )
    message = GroupInterrupted(
        lease=lease, reason=reason, partial=metas, tensors=tensors, temperature=temperature, lost=lost
    )
    return message, buffers


def read_partials(message: GenerateGroup, buffers: Sequence[bytes]) -> tuple[PartialCompletion, ...]:
    """Return the partial completions in `message`, from another replica.

    Raises:
        RequestError: the buffers do not match the message.
    """
    from starling.rollout.engine.base import PartialCompletion, RequestError

    if not message.partial:
        return ()
    total = sum(meta.num_tokens for meta in message.partial)
    sizes = [len(buffer) for buffer in buffers]
    further = {tensor.name: (tensor, buffer) for tensor, buffer in zip(message.tensors[3:], buffers[3:], strict=False)}
    fits = sizes[:3] == [total * dtype.itemsize for dtype in DTYPES] and len(sizes) == len(message.tensors)
    fits = fits and len(further) == len(sizes) - 3
    fits = fits and further.keys() - {ROUTING} in (set(), {KEPT_COUNTS, KEPT_IDS})
    counts = ids = None
    if fits and KEPT_IDS in further:
        counts, ids = (np.frombuffer(further[name][1], "<i4") for name in (KEPT_COUNTS, KEPT_IDS))
        fits = len(counts) == total and counts.min(initial=0) >= 0 and counts.sum(dtype=np.int64) == len(ids)
    experts = _read_experts(*further[ROUTING]) if fits and ROUTING in further else None
    if not fits or (experts is not None and len(experts) != total):
        raise RequestError(f"its partial completions have {total} tokens, and buffers of {sizes} bytes")
    ends = np.cumsum([meta.num_tokens for meta in message.partial])
    arrays = (np.frombuffer(buffer, dtype) for buffer, dtype in zip(buffers[:3], DTYPES, strict=True))
    token_ids, logprobs, versions = (np.split(array, ends[:-1]) for array in arrays)
    kept = None if counts is None or ids is None else KeptTokens(counts, ids)
    return tuple(
        PartialCompletion(
            token_ids[index],
            logprobs[index],
            versions[index],
            meta.status if meta.num_tokens else None,  # none has ended without a token: an answer needs its version
            None if kept is None else kept.take(slice(ends[index] - meta.num_tokens, ends[index])),
            routing=None if experts is None else experts[ends[index] - meta.num_tokens : ends[index]],
        )
        for index, meta in enumerate(message.partial)
    )


def played_message(
    played: PlayedGroup, decode: Callable[[Sequence[int]], str]
) -> tuple[GroupGenerated, tuple[bytes, ...]]:
    """Return the message for the trajectories of an environment, and its buffers: as `generated_message`, and the loss
    mask where some tokens were not sampled."""
    trajectories = played.trajectories
    arrays: NamedArrays = [
        ("", played.prompt_ids),
        ("", np.concatenate([trajectory.token_ids for trajectory in trajectories])),
        ("", np.concatenate([trajectory.logprobs for trajectory in trajectories])),
        ("", np.concatenate([trajectory.versions for trajectory in trajectories])),
        *played.tensors.items(),
        *_kept_arrays(join_kept((t.kept, len(t.token_ids)) for t in trajectories)),
        *_routing_arrays(
            (played.prompt_routing, len(played.prompt_ids)), [(t.routing, len(t.token_ids)) for t in trajectories]
        ),
    ]
    loss_mask = np.concatenate([trajectory.loss_mask for trajectory in trajectories])
    if not loss_mask.all():
        arrays.append(("loss_mask", loss_mask))
    metas = tuple(_trajectory_meta(trajectory, decode, played.min_version) for trajectory in trajectories)
    tensors, buffers = _frames(arrays)
    message = GroupGenerated(lease=played.lease, trajectories=metas, tensors=tensors, temperature=played.temperature)
    return message, buffers


def _trajectory_meta(
    trajectory: Trajectory, decode: Callable[[Sequence[int]], str], min_version: int
) -> TrajectoryMeta:
    versions = trajectory.versions[trajectory.loss_mask == 1]
    return TrajectoryMeta(
        status=trajectory.status,
        num_tokens=len(trajectory.token_ids),
        text=decode(trajectory.token_ids.tolist()),
        # A failure without a sampled token has no version; the oldest allowed one stands in for it.
        oldest_version=int(versions.min()) if len(versions) else min_version,
        newest_version=int(versions.max()) if len(versions) else min_version,
        reward=trajectory.reward,
        metrics=dict(trajectory.metrics),
        num_turns=trajectory.num_turns,
        problem=trajectory.problem,
        num_masked=len(trajectory.token_ids) - len(versions),
        truncation_nats=trajectory.truncation_nats,
    )


def lease_progress(progress: PullProgress) -> LeaseProgress:
    """Return a pull's progress for the heartbeat; an infinite time left means that it is not known yet."""
    return LeaseProgress(
        bytes_done=progress.bytes_done,
        bytes_total=progress.bytes_total,
        seconds_left=progress.seconds_left if math.isfinite(progress.seconds_left) else None,
    )


def _kept_arrays(kept: KeptTokens | None) -> NamedArrays:
    return [] if kept is None else [(KEPT_COUNTS, kept.counts), (KEPT_IDS, kept.ids)]


def _routing_arrays(prompt: tuple[Experts | None, int], completions: list[tuple[Experts | None, int]]) -> NamedArrays:
    """Return the experts of a prompt and of its completions, each with its number of tokens; nothing without any."""
    joined = join_experts([prompt, *completions])
    return [] if joined is None else [(PROMPT_ROUTING, joined[: prompt[1]]), (ROUTING, joined[prompt[1] :])]


def _read_experts(tensor: TensorMeta, buffer: bytes) -> Experts:
    """Return the experts of tokens, from another replica; of no token if their form is wrong."""
    form = ROUTING_FORMS.get(tensor.dtype)
    if form is None or len(tensor.shape) != form.num_dims or min(tensor.shape) < 0:
        return np.zeros((0, 0, 0), np.uint8)
    if math.prod(tensor.shape) * form.item_bytes != len(buffer):
        return np.zeros((0, 0, 0), np.uint8)
    return np.frombuffer(buffer, form.dtype).reshape(tensor.shape)


def _frames(arrays: NamedArrays) -> tuple[tuple[TensorMeta, ...], tuple[bytes, ...]]:
    """Return the descriptions of `arrays`, and their bytes."""
    tensors = tuple(TensorMeta(dtype=a.dtype.name, shape=a.shape, nbytes=a.nbytes, name=name) for name, a in arrays)
    return tensors, tuple(a.tobytes() for _, a in arrays)
