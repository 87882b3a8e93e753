"""Groups of a step as messages to the policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from starling.common.ranges import MAX_TOKENS
from starling.common.wire import messages as wire
from starling.common.wire.codec import MAX_BUFFERS, MAX_MESSAGE_BYTES
from starling.common.wire.tensors import (
    DENOISING_TENSORS,
    GROUP_TENSORS,
    KEPT_TENSORS,
    LOSS_MASK,
    PROMPT_TENSORS,
    ROUTING_TENSORS,
    TEACHER_TENSORS,
)
from starling.controller.core.events import Buffers
from starling.controller.core.groups.group import Group
from starling.controller.core.groups.validation.scores import TrainedScorer, scores_of

FURTHER_BYTES: Final = 1 << 20
"""Of a message with a step, besides its groups: its settings, and the layouts' names."""
ID_CHARACTERS: Final = 64
"""Longest id of a prompt: `train/EPOCH/ROW`."""


def to_train_group(group: Group, scorers: Sequence[TrainedScorer] = ()) -> wire.TrainGroup:
    """Return a scored group as the message to a policy. `scorers`: those whose scores it gets one by one."""
    trajectories = [
        wire.ScoredTrajectory(num_tokens=t.num_tokens, oldest_version=t.oldest_version, reward=reward, status=t.status)
        for t, reward in zip(group.trajectories, group.rewards, strict=True)
        if reward is not None
    ]
    return wire.TrainGroup(
        prompt_id=group.prompt.id,
        trajectories=tuple(trajectories),
        tensors=group.tensors,
        temperature=group.temperature,
        scores=scores_of(group.components, scorers, len(trajectories)) if scorers else (),
    )


def step_problem(
    prompts_per_step: int,
    group_size: int,
    sampling: wire.Sampling,
    *,
    has_teacher: bool,
    scorers: Sequence[TrainedScorer] = (),
    denoises: bool = False,
) -> str:
    """Return why the groups of a step may not fit into one message, in one sentence; empty if they always do.

    A rollout chooses how many tensors its groups have, and how large the numbers in them are, within what the recipe
    allows: the largest ones count. `scorers`: those whose scores are sent; `denoises`: completions are denoising
    trajectories.
    """
    names = [*[""] * len(GROUP_TENSORS), LOSS_MASK, *PROMPT_TENSORS]
    names += [*(KEPT_TENSORS if sampling.logprobs == "truncated" else ()), *(TEACHER_TENSORS if has_teacher else ())]
    names += ROUTING_TENSORS if sampling.routing == "replayed" else ()
    names += DENOISING_TENSORS if denoises else ()
    most = 1 << 40
    tensors = [wire.TensorMeta(dtype="float32", shape=(most, most), nbytes=most, name=name) for name in names]
    trajectory = wire.ScoredTrajectory(
        num_tokens=MAX_TOKENS, oldest_version=most, reward=0.5, status=wire.Status.TRUNCATED
    )
    scores = scores_of({scorer.label: (0.5,) * group_size for scorer in scorers}, scorers, group_size)
    group = wire.TrainGroup(
        prompt_id="x" * ID_CHARACTERS, trajectories=(), tensors=tuple(tensors), temperature=0.5, scores=scores
    )
    group_bytes, completion_bytes = (len(msgspec.msgpack.encode(one)) for one in (group, trajectory))
    num_buffers, num_bytes = len(names), group_bytes + group_size * completion_bytes
    fit = min(MAX_BUFFERS // num_buffers, (MAX_MESSAGE_BYTES - FURTHER_BYTES) // num_bytes)
    if prompts_per_step <= fit:
        return ""
    return (
        f"rl.prompts_per_step = {prompts_per_step} with rl.group_size = {group_size} does not fit into a message: one "
        f"has at most {MAX_BUFFERS} tensors and {MAX_MESSAGE_BYTES} bytes besides them; set at most {fit} prompts per "
        "step, or smaller groups"
    )


def buffers_of(groups: list[Group]) -> Buffers:
    """Return the buffers of groups, in order."""
    return tuple(buffer for group in groups for buffer in group.buffers)
