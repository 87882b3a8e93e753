"""What a step is made of: scored groups, or supervised examples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from starling.common.errors import ConfigError, WireError
from starling.common.wire.messages import TensorMeta, TrainGroup

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

_DTYPES = (np.dtype(np.int32), np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.int32))


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The scored completions of one prompt; tokens of all completions lie end to end, T of them."""

    prompt_ids: IntArray
    """Token ids, [prompt], at least one."""
    completion_ids: IntArray
    """Token ids, [T]."""
    logprobs: FloatArray
    """Log-probability of each token when it was sampled, [T]."""
    versions: IntArray
    """Weight version that sampled each token, [T]."""
    lengths: tuple[int, ...]
    """Tokens of each completion; their sum is T. An empty completion is scored but not trained."""
    rewards: tuple[float, ...]
    """Reward of each completion."""
    prompt_id: str = ""
    """Names the group in errors."""
    temperature: float = 0.0
    """Divisor of the logits under which it was sampled; 0 for that of the step."""

    def __post_init__(self) -> None:
        _check_prompt(self.prompt_ids, self.prompt_id)
        total = sum(self.lengths)
        sizes = (len(self.completion_ids), len(self.logprobs), len(self.versions))
        if any(size != total for size in sizes) or min(self.lengths, default=0) < 0:
            raise ConfigError(
                f"group {self.prompt_id!r} has completions of {self.lengths} tokens but {sizes[0]} token ids, "
                f"{sizes[1]} log-probabilities and {sizes[2]} versions: each must have one entry per token"
            )
        if len(self.rewards) != len(self.lengths):
            raise ConfigError(
                f"group {self.prompt_id!r} has {len(self.lengths)} completions but {len(self.rewards)} rewards: "
                "give one reward per completion"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """A prompt and the response to learn."""

    prompt_ids: IntArray
    """Token ids, [prompt], at least one."""
    response_ids: IntArray
    """Token ids, [response], the end-of-sequence token included."""
    prompt_id: str = ""
    """Names the example in errors."""

    def __post_init__(self) -> None:
        _check_prompt(self.prompt_ids, self.prompt_id)
        if not len(self.response_ids):
            raise ConfigError(f"example {self.prompt_id!r} has an empty response: give at least one token to learn")


def groups_from_wire(groups: Sequence[TrainGroup], buffers: Sequence[Any]) -> list[Group]:
    """Read the groups of a `TrainStep` from its buffer frames, without copying them.

    Args:
        groups: the message's groups.
        buffers: its frames (bytes or memoryviews) in the order of the groups, four for each.

    Raises:
        WireError: frames are missing, left over, or not what their description says.
    """
    frames = iter(buffers)
    read = [_read(group, frames) for group in groups]
    surplus = sum(1 for _ in frames)
    if surplus:
        raise WireError(f"a step of {len(groups)} groups came with {surplus} buffers too many")
    return read


def _read(group: TrainGroup, frames: Iterator[Any]) -> Group:
    if len(group.tensors) != len(_DTYPES):
        raise WireError(f"group {group.prompt_id!r} describes {len(group.tensors)} tensors instead of {len(_DTYPES)}")
    arrays = []
    for meta, dtype in zip(group.tensors, _DTYPES, strict=True):
        frame = next(frames, None)
        if frame is None:
            raise WireError(f"group {group.prompt_id!r} lacks a buffer that it describes")
        arrays.append(_array(group.prompt_id, meta, dtype, frame))
    prompt_ids, completion_ids, logprobs, versions = arrays
    try:
        return Group(
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            logprobs=logprobs,
            versions=versions,
            lengths=tuple(trajectory.num_tokens for trajectory in group.trajectories),
            rewards=tuple(trajectory.reward for trajectory in group.trajectories),
            prompt_id=group.prompt_id,
            temperature=group.temperature,
        )
    except ConfigError as error:
        raise WireError(str(error)) from error


def _array(prompt_id: str, meta: TensorMeta, dtype: np.dtype[Any], frame: Any) -> npt.NDArray[Any]:
    size_bytes = memoryview(frame).nbytes
    if meta.dtype != dtype.name or len(meta.shape) != 1 or meta.shape[0] * dtype.itemsize != size_bytes:
        raise WireError(
            f"group {prompt_id!r} describes a tensor {meta.dtype}{list(meta.shape)} in a buffer of {size_bytes} bytes; "
            f"expected one dimension of {dtype.name}"
        )
    return np.frombuffer(frame, dtype=dtype)


def _check_prompt(prompt_ids: IntArray, prompt_id: str) -> None:
    if not len(prompt_ids):
        raise ConfigError(
            f"prompt {prompt_id!r} has no tokens: give at least one, such as the beginning-of-sequence token"
        )
