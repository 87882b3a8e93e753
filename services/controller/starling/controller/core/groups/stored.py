"""A group as it stands in a file of trajectories."""

from __future__ import annotations

import msgspec

from starling.common.wire.messages import Prompt, TensorMeta, TrajectoryMeta


class StoredGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The completions of one prompt, with all that is known of them. Buffers are as `TrainGroup` lists them."""

    ordinal: int
    """Position of the prompt in the data of the run that wrote it."""
    prompt: Prompt
    trajectories: tuple[TrajectoryMeta, ...] = ()
    """Empty where the group was given up."""
    rewards: tuple[float | None, ...] = ()
    """In the order of the trajectories; empty where nothing scores."""
    components: dict[str, tuple[float | None, ...]] = {}
    """Each scorer's unweighted score, by name."""
    tensors: tuple[TensorMeta, ...] = ()
    buffers: tuple[bytes, ...] = ()
    """One for each of `tensors`; both are empty where tokens are not kept."""
    temperature: float = 1.0
    """Divisor of the logits under which they were sampled."""
    problem: str = ""
    """Why it was given up, in one sentence."""
